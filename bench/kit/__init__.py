"""The ground of every bench: processes, a line, cells that become rows, results as JSON."""
