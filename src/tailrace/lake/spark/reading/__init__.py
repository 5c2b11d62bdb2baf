"""A worker's work on a slice: oplog batches to events, and events to Arrow columns."""

from tailrace.lake.spark.reading.zipped import use_kernel_of_zip_file

use_kernel_of_zip_file()
