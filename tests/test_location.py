"""`Location`: one form of the URL, one store, and no secret that is shown or pickled."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from bucketpoint.location import Location
from bucketpoint.stores.s3 import S3Store


def test_keeps_one_form_of_the_url_one_store_and_the_options_for_other_urls(tmp_path: Path) -> None:
    place = Location.of("s3://bucket/run/", {"endpoint_url": "http://e"})
    assert Location.of(place) is place
    store, prefix = place.opened
    assert isinstance(store, S3Store)
    assert (place.url, store.bucket, prefix) == ("s3://bucket/run", "bucket", "run")
    assert place.opened[0] is store
    assert Location.of(tmp_path).url == str(tmp_path)
    other = place.at("s3://other/")
    assert (other.url, other.storage_options, other.fs) == ("s3://other", place.storage_options, None)
    assert other.opened[0].url == "s3://other"


def test_shows_and_pickles_no_secret() -> None:
    place = Location.of("s3://bucket/run", {"secret": "abc123secret"})
    assert place.opened
    assert repr(place) == "Location(url='s3://bucket/run')"
    with pytest.raises(TypeError, match="credentials") as raised:
        pickle.dumps(place)
    assert "abc123secret" not in str(raised.value)
