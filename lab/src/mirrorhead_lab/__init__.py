"""The laboratory: data sets, models, training, experiments and the command `mirrorhead`.

It checks the paper's claims with the library, which never imports it.
"""
