"""A cache in memory that forgets a document as soon as somebody changes it."""

import os
import threading

from pymongo import MongoClient

client = MongoClient(os.environ["MONGODB_URI"])
products = client[os.environ["DATABASE"]]["products"]
cache = {}
watching, invalidated = threading.Event(), threading.Semaphore(0)


def product(key):
    if key not in cache:
        cache[key] = products.find_one({"_id": key})
        print("from the database:", cache[key])
    return cache[key]


def invalidate():
    with products.watch([{"$project": {"documentKey": 1, "operationType": 1}}]) as stream:
        watching.set()
        for change in stream:
            if change["operationType"] in ("drop", "invalidate"):
                cache.clear()
                continue
            cache.pop(change["documentKey"]["_id"], None)
            print("forgotten:", change["operationType"], change["documentKey"])
            invalidated.release()


products.insert_many([{"_id": "pen", "price": 2}, {"_id": "ink", "price": 9}])
thread = threading.Thread(target=invalidate)
thread.start()
watching.wait()
product("pen"), product("pen"), product("ink")
products.update_one({"_id": "pen"}, {"$inc": {"price": 1}})
invalidated.acquire()
product("pen"), product("ink")
products.delete_one({"_id": "ink"})
invalidated.acquire()
print(product("ink"))
products.drop()
thread.join()
client.close()
