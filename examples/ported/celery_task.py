"""Celery: a task that takes the changes since its last run and starts one task for each."""

import os

from celery import Celery
from pymongo import MongoClient

app = Celery("changes")
app.conf.task_always_eager = True
database_name = os.environ["DATABASE"]


@app.task
def send_mail(order, kind):
    print("mail about order", order, kind)


@app.task
def follow_orders():
    """Run by the beat every minute; the resume token is kept in the database."""
    with MongoClient(os.environ["MONGODB_URI"]) as client:
        database = client.get_database(database_name)
        place = database.places.find_one({"_id": "orders"}) or {}
        with database.orders.watch(resume_after=place.get("token"), max_await_time_ms=200) as stream:
            count = 0
            while (change := stream.try_next()) is not None:
                send_mail.delay(change["documentKey"]["_id"], change["operationType"])
                count += 1
            database.places.replace_one({"_id": "orders"}, {"token": stream.resume_token}, upsert=True)
        return count


print(follow_orders.delay().get())
with MongoClient(os.environ["MONGODB_URI"]) as client:
    orders = client[database_name].orders
    orders.insert_many([{"_id": 1}, {"_id": 2}])
    orders.update_one({"_id": 1}, {"$set": {"paid": True}})
    print(follow_orders.delay().get())
    orders.delete_one({"_id": 2})
    print(follow_orders.delay().get())
    print(follow_orders.delay().get())
