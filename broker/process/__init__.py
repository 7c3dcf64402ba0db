"""The broker as a process: one host, real sockets, threads, files for people."""
