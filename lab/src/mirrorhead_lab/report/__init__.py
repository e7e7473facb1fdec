"""The report: one page that needs nothing else, with a verdict beside every claim."""
