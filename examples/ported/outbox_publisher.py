"""The outbox: an order and its message are written in one transaction, and messages are published in their order, also
after the publisher was stopped."""

import os

from pymongo import MongoClient
from pymongo.write_concern import WriteConcern

client = MongoClient(os.environ["MONGODB_URI"])
database = client[os.environ["DATABASE"]]
orders = database.create_collection("orders")
outbox = database.create_collection("outbox", write_concern=WriteConcern("majority"))
places = database["places"]


def order(number):
    def both(session):
        orders.insert_one({"_id": number}, session=session)
        outbox.insert_one({"_id": f"order {number}", "body": {"number": number}}, session=session)

    with client.start_session() as session:
        session.with_transaction(both)


def publish(limit):
    place = places.find_one({"_id": "publisher"})
    resume = {"resume_after": place["token"]} if place else {"start_at_operation_time": begun}
    with outbox.watch([{"$match": {"operationType": "insert"}}], **resume) as stream:
        for _ in range(limit):
            change = stream.next()
            print("published", change["fullDocument"]["_id"], "txnNumber" in change)
            places.replace_one({"_id": "publisher"}, {"token": change["_id"]}, upsert=True)


begun = client.admin.command("ping")["operationTime"]
for number in range(4):
    order(number)
publish(3)
with client.start_session() as session, session.start_transaction():
    orders.insert_one({"_id": "never"}, session=session)
    outbox.insert_one({"_id": "never"}, session=session)
    session.abort_transaction()
order(4)
publish(2)
client.close()
