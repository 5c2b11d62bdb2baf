"""Changes as messages: ordered, at least once, each with its resume token as the id by which repeats are recognised.

``RedisPublisher`` needs the extra ``redis``, ``NatsPublisher`` ``nats`` and ``KafkaPublisher`` ``kafka``: they are
imported from their modules ``redis_streams``, ``nats_jetstream`` and ``kafka``.
"""
