"""What tests of S3 share beside the fixture `s3`."""

from __future__ import annotations

BUCKET = "bucket"
