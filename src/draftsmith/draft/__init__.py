"""The draft model and its mathematics: pure functions of tensors, with no files and no effects."""
