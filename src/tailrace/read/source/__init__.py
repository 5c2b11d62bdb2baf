"""Where oplog entries come from: a running mongod or a dump file; and the driver that answers a pipeline from them."""
