"""``hvdtrain report``: runs as a page of figures, in a file or live."""
