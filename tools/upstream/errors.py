"""What the tool raises for a user to read."""


class StackError(Exception):
    """The manifest, the package and the tree do not fit; the text says what to do."""


class UnknownTreeError(StackError):
    """A torch tree that the stack was not made for."""


class TreeError(StackError):
    """The tree as it is now cannot be imported."""
