"""A queue of jobs: one thread hears of new ones, a pool of threads claims and does them."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from pymongo import MongoClient, ReturnDocument

client = MongoClient(os.environ["MONGODB_URI"])
jobs = client[os.environ["DATABASE"]].jobs
JOBS = 20
done = threading.Semaphore(0)


def work(key):
    job = jobs.find_one_and_update(
        {"_id": key, "state": "new"}, {"$set": {"state": "taken"}}, return_document=ReturnDocument.AFTER
    )
    if job is not None:
        jobs.update_one({"_id": key}, {"$set": {"state": "done", "result": job["n"] ** 2}})
        done.release()


def listen(opened):
    with ThreadPoolExecutor(4) as pool, jobs.watch([{"$match": {"operationType": "insert"}}]) as stream:
        opened.set()
        for number, change in enumerate(stream, 1):
            pool.submit(work, change["documentKey"]["_id"])
            pool.submit(work, change["documentKey"]["_id"])  # twice: the second finds it taken
            if number == JOBS:
                break


opened = threading.Event()
listener = threading.Thread(target=listen, args=(opened,))
listener.start()
opened.wait()
for n in range(JOBS):
    jobs.insert_one({"n": n, "state": "new"})
for _ in range(JOBS):
    done.acquire()
listener.join()
print(sorted(job["result"] for job in jobs.find({"state": "done"})))
print(jobs.count_documents({"state": {"$ne": "done"}}))
client.close()
