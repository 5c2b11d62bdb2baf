"""A view that is kept up to date: the total of each customer, written by bulk operations."""

import os
import threading

from pymongo import MongoClient, UpdateOne

client = MongoClient(os.environ["MONGODB_URI"])
database = client[os.environ["DATABASE"]]
lines, totals = database["lines"], database["totals"]
LAST = "last"


def keep(opened):
    pipeline = [
        {"$match": {"operationType": {"$in": ["insert", "update"]}}},
        {"$set": {"customer": "$fullDocument.customer"}},
        {"$project": {"customer": 1, "documentKey": 1}},
    ]
    with lines.watch(pipeline, full_document="updateLookup", batch_size=5) as stream:
        opened.set()
        for change in stream:
            customer = change["customer"]
            found = lines.aggregate(
                [{"$match": {"customer": customer}}, {"$group": {"_id": None, "sum": {"$sum": "$amount"}}}]
            )
            totals.bulk_write([UpdateOne({"_id": customer}, {"$set": {"sum": next(found)["sum"]}}, upsert=True)])
            if change["documentKey"]["_id"] == LAST:
                break


opened = threading.Event()
keeper = threading.Thread(target=keep, args=(opened,))
keeper.start()
opened.wait()
for number in range(30):
    lines.insert_one({"_id": number, "customer": f"c{number % 3}", "amount": number})
lines.update_many({"customer": "c1"}, {"$inc": {"amount": 100}})
lines.insert_one({"_id": LAST, "customer": "c2", "amount": 1})
keeper.join()
print(list(totals.find(sort=[("_id", 1)])))
client.close()
