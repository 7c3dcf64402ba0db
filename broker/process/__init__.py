"""The broker as a process: one host, real sockets, worker threads, log and events file."""
