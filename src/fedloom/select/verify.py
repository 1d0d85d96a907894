def verify(channels, shape): pass
