"""The store of hidden states: written by extract, read by train and evaluate."""
