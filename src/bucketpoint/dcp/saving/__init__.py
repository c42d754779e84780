"""The save path: the layout of objects, what ranks report, and the commit."""
