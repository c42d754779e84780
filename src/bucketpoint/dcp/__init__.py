"""Storage writer, storage reader and planners for DCP, and the functions `save`, `load` and `async_save`."""
