"""Everything that crosses the wire, and all that both ends share. Torch is not imported here."""
