"""Where workers run: in this process or as Ray actors; the scheduler that leases shards to them."""
