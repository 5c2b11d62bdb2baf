"""An audit trail: who had what before and after, from pre- and post-images."""

import os

from pymongo import MongoClient

with MongoClient(host=os.environ["MONGODB_URI"], tz_aware=True) as client:
    database = client.get_database(os.environ["DATABASE"])
    accounts = database.create_collection("accounts", changeStreamPreAndPostImages={"enabled": True})
    with database.watch(
        [{"$match": {"ns.coll": "accounts"}}],
        "whenAvailable",
        full_document_before_change="whenAvailable",
        comment="audit",
    ) as stream:
        accounts.insert_one({"_id": "ann", "balance": 10})
        accounts.update_one({"_id": "ann"}, {"$inc": {"balance": 5}})
        accounts.replace_one({"_id": "ann"}, {"balance": 0})
        accounts.delete_one({"_id": "ann"})
        for change in stream:
            entry = {
                "what": change["operationType"],
                "before": change.get("fullDocumentBeforeChange"),
                "after": change.get("fullDocument"),
                "at": change["wallTime"].tzinfo is not None,
            }
            database.audit.insert_one(dict(entry))
            print(entry)
            if entry["what"] == "delete":
                break
    print(database.audit.count_documents({"before.balance": 10}))
