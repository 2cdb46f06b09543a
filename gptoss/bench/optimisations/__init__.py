"""The source documents' optimisation catalogue, OPT-1 to OPT-24, one side against the other; `catalogue.py` makes the table."""
