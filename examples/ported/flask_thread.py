"""Flask: a thread beside the requests keeps the numbers of a dashboard."""

import os
import threading
from collections import Counter

from flask import Flask, jsonify
from pymongo import MongoClient
from pymongo.errors import PyMongoError

app = Flask(__name__)
client = MongoClient(os.environ["MONGODB_URI"])
database = client[os.environ["DATABASE"]]
numbers, opened, heard = Counter(), threading.Event(), threading.Semaphore(0)


def count():
    try:
        with database.watch(full_document="updateLookup") as stream:
            opened.set()
            for change in stream:
                numbers[f"{change.get('ns', {}).get('coll')} {change['operationType']}"] += 1
                heard.release()
    except PyMongoError as error:
        print("the stream has ended:", error)


@app.post("/visits/<name>")
def visit(name):
    database.visits.update_one({"_id": name}, {"$inc": {"count": 1}}, upsert=True)
    heard.acquire()
    return "", 204


@app.get("/numbers")
def show():
    return jsonify(dict(numbers))


thread = threading.Thread(target=count)
thread.start()
opened.wait()
browser = app.test_client()
for name in ("ann", "bob", "ann"):
    print(browser.post(f"/visits/{name}").status)
print(browser.get("/numbers").get_json())
client.drop_database(database.name)
thread.join()
print(browser.get("/numbers").get_json())
client.close()
