"""How long and how big: formulas for operators, devices and links, and models that price items and memory.

Free of torch. Everything here is a pure function of the ir's nouns, except the reading of a cluster file and of the
measurement that ``partita doctor`` saves.
"""
