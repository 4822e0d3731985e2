"""Fuzzers for everything that reads bytes from other processes: `python -m tests.fuzz.run --inputs 1000000`.

An input is a mutated seed. A target hands it to a parser of the package, in this process, and fails unless the parser
raises one of our errors or understands the input as a plain reference does. Inputs follow from a number, so that
`--only NUMBER` repeats one. Seeds are what the targets make and the files in seeds/TARGET, which found something once.
"""
