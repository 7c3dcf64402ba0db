"""`narrows page`: one process asks the broker and shows the run to any number of viewers."""
