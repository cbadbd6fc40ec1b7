"""Modules that the process which ranks are forks of imports by their own names, without this package:
``processes.py`` puts the folder on its path."""
