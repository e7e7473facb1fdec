"""The laboratory: data sets, models, training, experiments and the command line.

It checks the paper's claims with the library, and needs the extra: `pip install mirrorhead[lab]`.
"""
