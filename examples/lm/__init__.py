"""The parts of train_lm.py, importable: config, data, model, optimizer, checkpoint, train, report."""
