"""FastAPI: a page hears of changes by server-sent events. One stream for each visitor."""

import asyncio
import json
import os

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pymongo import AsyncMongoClient

app = FastAPI()
client = AsyncMongoClient(os.environ["MONGODB_URI"])
prices = client[os.environ["DATABASE"]]["prices"]
opened = asyncio.Event()


@app.get("/prices")
async def changes():
    async def lines():
        async with await prices.watch([{"$match": {"operationType": "update"}}]) as stream:
            opened.set()
            async for change in stream:
                # As JSON: a newline in a key or a value would begin an event of the writer's own.
                shown = {"_id": change["documentKey"]["_id"], **change["updateDescription"]["updatedFields"]}
                yield f"data: {json.dumps(shown, default=str)}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


async def visit(count):
    """What a browser does: ask, read so many events, go away."""
    seen, left = [], asyncio.Event()

    async def receive():
        if not asked:
            asked.append(True)
            return {"type": "http.request", "body": b"", "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.start":
            print(message["status"], dict(message["headers"])[b"content-type"])
        elif message.get("body"):
            seen.append(message["body"].decode().strip())
            if len(seen) == count:
                left.set()

    asked = []
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "path": "/prices"}
    scope |= {"raw_path": b"/prices", "query_string": b"", "headers": [], "scheme": "http", "root_path": ""}
    await app(scope, receive, send)
    return seen


async def main():
    await prices.insert_many([{"_id": "pen", "price": 2}, {"_id": "ink", "price": 9}])
    visitor = asyncio.create_task(visit(3))
    await opened.wait()
    for key, price in (("pen", 3), ("ink", 8), ("pen", 4)):
        await prices.update_one({"_id": key}, {"$set": {"price": price}})
    print(*await visitor, sep="\n")
    await client.close()


asyncio.run(main())
