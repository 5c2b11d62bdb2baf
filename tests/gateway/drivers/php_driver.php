<?php
// What PHP's driver does with a deployment, as facts to compare: JSON on standard output.
//
//   php php_driver.php URI NAME
//
// NAME is part of the database's name and the application's, so that fail points affect this program alone.
// The extension has commands, bulk writes, sessions and cursors. Resuming and GridFS belong to a library that Debian does
// not have, so this program resumes with the tokens itself, as programs without the library do.
use MongoDB\Driver\{BulkWrite, Command, Cursor, Manager, Query, WriteConcern};
use MongoDB\Driver\Exception\RuntimeException;
use MongoDB\Driver\Monitoring\{CommandFailedEvent, CommandStartedEvent, CommandSubscriber, CommandSucceededEvent};

[, $uri, $name] = $argv;
$facts = [];

class Counter implements CommandSubscriber
{
    public array $started = [];
    public function commandStarted(CommandStartedEvent $event): void { $this->started[$event->getCommandName()] = true; }
    public function commandSucceeded(CommandSucceededEvent $event): void {}
    public function commandFailed(CommandFailedEvent $event): void {}
}

$counter = new Counter();
MongoDB\Driver\Monitoring\addSubscriber($counter);
$manager = new Manager($uri, ["appname" => $name, "w" => "majority", "heartbeatFrequencyMS" => 1000]);

function run(array $command, string $database = "", array $options = []): Cursor
{
    global $manager, $name;
    return $manager->executeCommand($database ?: $name, new Command($command), $options);
}

function write(string $collection, BulkWrite $bulk, array $options = []): MongoDB\Driver\WriteResult
{
    global $manager, $name;
    return $manager->executeBulkWrite("$name.$collection", $bulk, $options);
}

function insert(string $collection, array $documents, array $options = []): int
{
    $bulk = new BulkWrite();
    array_walk($documents, fn($one) => $bulk->insert($one));
    return write($collection, $bulk, $options)->getInsertedCount();
}

function change(string $collection, string $method, ...$arguments): MongoDB\Driver\WriteResult
{
    $bulk = new BulkWrite();
    $bulk->$method(...$arguments);
    return write($collection, $bulk);
}

function find(string $collection, array $filter = [], array $options = [], array $more = []): array
{
    global $manager, $name;
    return $manager->executeQuery("$name.$collection", new Query($filter, $options), $more)->toArray();
}

function textOf(callable $work): array
{
    try {
        $work();
        return ["no error"];
    } catch (RuntimeException $error) {
        return [$error->getCode(), $error->getMessage(), $error->hasErrorLabel("ResumableChangeStreamError")];
    }
}

function crud(): void
{
    global $facts;
    insert("crud", array_map(fn($number) => ["_id" => $number, "x" => $number % 7], range(0, 299)));
    $facts["found"] = count(find("crud", [], ["batchSize" => 50, "sort" => ["_id" => 1]]));
    $facts["updated"] = change("crud", "update", ["x" => 3], ['$inc' => ["x" => 100]], ["multi" => true])->getModifiedCount();
    $facts["replaced"] = run(["findAndModify" => "crud", "query" => ["_id" => 1], "update" => ["y" => 1], "new" => true])->toArray()[0]->value;
    $facts["deleted"] = change("crud", "delete", ["x" => ['$gt' => 100]])->getDeletedCount();
    $bulk = new BulkWrite(["ordered" => true]);
    $bulk->insert(["_id" => 1000]);
    $bulk->update(["_id" => 1000], ['$set' => ["a" => 1]]);
    $bulk->update(["_id" => 1001], ["b" => 1], ["upsert" => true]);
    $bulk->delete(["_id" => 1000], ["limit" => 1]);
    $done = write("crud", $bulk);
    $facts["bulk"] = [$done->getInsertedCount(), $done->getModifiedCount(), $done->getUpsertedCount(), $done->getDeletedCount()];
    $facts["duplicate"] = textOf(fn() => insert("crud", [["_id" => 1]]));
    $facts["count"] = run(["count" => "crud"])->toArray()[0]->n;
    $facts["unacknowledged"] = write("crud", tap(new BulkWrite(), fn($bulk) => $bulk->insert(["_id" => 2000])),
        ["writeConcern" => new WriteConcern(0)])->isAcknowledged();
    $facts["groups"] = run(["aggregate" => "crud", "pipeline" => [['$group' => ["_id" => '$x', "n" => ['$sum' => 1]]],
        ['$sort' => ["_id" => 1]]], "cursor" => ["batchSize" => 2]])->toArray();
}

function tap(BulkWrite $bulk, callable $work): BulkWrite
{
    $work($bulk);
    return $bulk;
}

function transactions(): void
{
    global $facts, $manager;
    run(["create" => "transactions"]);
    $session = $manager->startSession();
    $session->startTransaction();
    insert("transactions", [["_id" => 1], ["_id" => 2]], ["session" => $session]);
    $facts["outside"] = count(find("transactions"));
    $facts["inside"] = count(find("transactions", [], [], ["session" => $session]));
    $session->commitTransaction();
    $session->startTransaction();
    insert("transactions", [["_id" => 3]], ["session" => $session]);
    $session->abortTransaction();
    $session->endSession();
    $facts["committed"] = count(find("transactions"));
}

function indexes(): void
{
    global $facts;
    run(["createIndexes" => "crud", "indexes" => [["key" => ["x" => 1, "y" => -1], "name" => "both"]]]);
    $facts["indexes"] = array_map(fn($one) => $one->name, run(["listIndexes" => "crud"])->toArray());
    run(["dropIndexes" => "crud", "index" => "both"]);
}

function failing(string $command, array $failure, callable $work): void
{
    global $name;
    run(["configureFailPoint" => "failCommand", "mode" => ["times" => 1],
        "data" => ["failCommands" => [$command], "appName" => $name] + $failure], "admin");
    try {
        $work();
    } finally {
        run(["configureFailPoint" => "failCommand", "mode" => "off"], "admin");
    }
}

function retries(): void
{
    global $facts;
    failing("insert", ["errorCode" => 6, "errorLabels" => ["RetryableWriteError"]],
        function () use (&$facts) { $facts["retried write"] = insert("retries", [["_id" => 1]]); });
    failing("find", ["errorCode" => 6], function () use (&$facts) { $facts["retried read"] = find("retries"); });
    failing("insert", ["errorCode" => 2],
        function () use (&$facts) { $facts["not retried"] = textOf(fn() => insert("retries", [["_id" => 2]])); });
}

function watch(string $collection, array $options = [], array $pipeline = [], int $batchSize = 0): Cursor
{
    global $manager;
    // The library gives a session of its own to each stream, too: its cursor belongs to it.
    return run(["aggregate" => $collection === "" ? 1 : $collection,
        "pipeline" => [['$changeStream' => (object) $options], ...$pipeline],
        "cursor" => $batchSize ? ["batchSize" => $batchSize] : new stdClass()], "", ["session" => $manager->startSession()]);
}

function take(Cursor $cursor, int $count, bool &$begun = false): array
{
    $events = [];
    if (!$begun) {
        $cursor->rewind();
        $begun = true;
    } else {
        $cursor->next();
    }
    for ($looks = 0; count($events) < $count && $looks < 1000; $looks++) { // each look waits
        if ($cursor->valid()) {
            $events[] = $cursor->current();
            if (count($events) === $count) break;
        }
        $cursor->next();
    }
    return $events;
}

function kinds(array $events): array { return array_map(fn($one) => $one->operationType, $events); }

function keys(array $events): array { return array_map(fn($one) => $one->documentKey->_id, $events); }

function watching(): void
{
    global $facts;
    run(["create" => "watched"]);
    $stream = watch("watched", ["fullDocument" => "updateLookup"]);
    $few = watch("", [], [['$match' => ["operationType" => ['$ne' => "update"]]]], 1);
    insert("watched", [["_id" => 1, "a" => 1]]);
    change("watched", "update", ["_id" => 1], ['$set' => ["a" => 2]]);
    change("watched", "update", ["_id" => 1], ["b" => 1]);
    $begun = false;
    $events = take($stream, 3, $begun);
    change("watched", "delete", ["_id" => 1]);
    $facts["watched"] = kinds([...$events, ...take($stream, 1, $begun)]);
    $facts["described"] = $events[1]->updateDescription;
    $facts["looked up"] = $events[1]->fullDocument;
    $facts["few"] = kinds(take($few, 3));
    $facts["dead"] = $stream->isDead();
}

function resuming(): void
{
    global $facts;
    run(["create" => "resumed"]);
    $first = watch("resumed");
    insert("resumed", array_map(fn($number) => ["_id" => $number], range(1, 4)));
    $event = take($first, 1)[0];
    foreach (["resumeAfter" => $event->_id, "startAfter" => $event->_id] as $option => $place) {
        $facts[$option] = keys(take(watch("resumed", [$option => $place]), 3));
    }
    $facts["startAtOperationTime"] = keys(take(watch("resumed", ["startAtOperationTime" => $event->clusterTime]), 4));
    $facts["unknown stage"] = textOf(fn() => watch("resumed", [], [['$nothing' => 1]]));
    $facts["no token"] = textOf(fn() => watch("resumed", ["resumeAfter" => ["_data" => "zz"]]));
    $facts["two places"] = textOf(fn() => watch("resumed", ["resumeAfter" => $event->_id, "startAfter" => $event->_id]));
    foreach (["cut" => ["closeConnection" => true], "told" => ["errorCode" => 10107],
        "lost" => ["errorCode" => 280]] as $label => $failure) {
        $stream = watch("resumed", ["resumeAfter" => $event->_id], [], 1);
        $stream->rewind();
        failing("getMore", $failure, function () use (&$facts, $label, $stream) {
            // The message about a connection that is cut is the operating system's.
            $facts[$label] = textOf(fn() => $stream->next())[$label === "cut" ? 2 : 1];
        });
    }
}

function invalidating(): void
{
    global $facts;
    run(["create" => "invalidated"]);
    $stream = watch("invalidated");
    insert("invalidated", [["_id" => 1]]);
    run(["drop" => "invalidated"]);
    $begun = false;
    $events = take($stream, 3, $begun);
    $facts["invalidated"] = kinds($events);
    $stream->next();
    $facts["dead afterwards"] = $stream->isDead();
    $again = watch("invalidated", ["startAfter" => $events[2]->_id]);
    insert("invalidated", [["_id" => 2]]);
    $facts["after invalidate"] = kinds(take($again, 1));
    $facts["resumed after"] = textOf(fn() => watch("invalidated", ["resumeAfter" => $events[2]->_id]))[0];
}

$status = 0;
try {
    run(["dropDatabase" => 1]);
    foreach (["crud", "transactions", "indexes", "retries", "watching", "resuming", "invalidating"] as $part) {
        fwrite(STDERR, "$part\n"); // so that whoever waits in vain sees where it is
        $part();
    }
    $facts["monitored"] = array_map(fn($command) => isset($counter->started[$command]),
        ["insert", "find", "getMore", "aggregate", "commitTransaction", "createIndexes"]);
    run(["dropDatabase" => 1]);
} catch (Throwable $error) {
    $facts["error"] = (string) $error;
    $status = 1;
}
echo json_encode($facts, JSON_PRETTY_PRINT), "\n";
exit($status);
