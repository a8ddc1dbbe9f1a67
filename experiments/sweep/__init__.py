"""Many runs as one sweep: rows with an identity, started again without loss, on one machine or many.

`main` is the command line of a program that can sweep. `collect` turns the folders of sweeps into one table.
"""
