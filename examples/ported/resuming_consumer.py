"""A consumer as the manuals show it: it goes on after errors by its last token, and after a drop with startAfter."""

import os

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

client = MongoClient(os.environ["MONGODB_URI"])
database = client[os.environ["DATABASE"]]
events = database.events


def consume(token, how, limit):
    try:
        with events.watch(**{how: token}) as stream:
            for number, change in enumerate(stream, 1):
                token = stream.resume_token
                print(change["operationType"], change.get("documentKey"))
                if number == limit:
                    break
            return token, stream.alive
    except OperationFailure as error:
        print("refused:", error.code, error.details["codeName"], error.has_error_label("ResumableChangeStreamError"))
    except PyMongoError as error:
        print("failed:", type(error).__name__)
    return token, False


with events.watch() as stream:
    token = stream.resume_token
events.insert_many([{"_id": n} for n in range(3)])
token, alive = consume(token, "resume_after", 2)
events.drop()
token, alive = consume(token, "resume_after", 10)
print(alive)
consume(token, "resume_after", 1)
events.insert_one({"_id": "again"})
consume(token, "start_after", 1)
consume({"_data": "82"}, "resume_after", 1)
consume({"_data": 5}, "resume_after", 1)
client.close()
