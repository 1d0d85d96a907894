"""Pictures and pages. Reads tables of finished work; knows nothing of training."""
