"""The benchmark: bucketpoint beside its peers. Run it with `make bench`; nothing here is part of the tests."""
