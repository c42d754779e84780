"""The parts that DCP calls: writer, reader, planners, and `save`, `load` and `async_save` around them."""
