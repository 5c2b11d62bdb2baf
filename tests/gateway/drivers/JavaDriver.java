// What Java's driver does with a deployment, as facts to compare: JSON on standard output.
//
//   java -cp DRIVER.jar:. JavaDriver URI NAME
//
// NAME is part of the database's name and the application's, so that fail points affect this program alone.
// Debian's version (3.6) says hello in OP_QUERY, watches collections only, and knows sessions, but no transactions yet.
import com.mongodb.MongoClient;
import com.mongodb.MongoClientOptions;
import com.mongodb.MongoClientURI;
import com.mongodb.MongoException;
import com.mongodb.ClientSessionOptions;
import com.mongodb.WriteConcern;
import com.mongodb.bulk.BulkWriteResult;
import com.mongodb.client.ChangeStreamIterable;
import com.mongodb.client.MongoCollection;
import com.mongodb.client.MongoCursor;
import com.mongodb.client.MongoDatabase;
import com.mongodb.client.gridfs.GridFSBuckets;
import com.mongodb.client.gridfs.GridFSBucket;
import com.mongodb.client.model.Aggregates;
import com.mongodb.client.model.DeleteOneModel;
import com.mongodb.client.model.Filters;
import com.mongodb.client.model.FindOneAndReplaceOptions;
import com.mongodb.client.model.InsertOneModel;
import com.mongodb.client.model.ReplaceOneModel;
import com.mongodb.client.model.ReturnDocument;
import com.mongodb.client.model.UpdateOneModel;
import com.mongodb.client.model.UpdateOptions;
import com.mongodb.client.model.changestream.FullDocument;
import com.mongodb.event.CommandFailedEvent;
import com.mongodb.event.CommandListener;
import com.mongodb.event.CommandStartedEvent;
import com.mongodb.event.CommandSucceededEvent;
import com.mongodb.session.ClientSession;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import java.util.logging.Level;
import java.util.logging.Logger;
import org.bson.BsonDocument;
import org.bson.Document;
import org.bson.types.ObjectId;

public final class JavaDriver {
    private static final Document FACTS = new Document();
    private static final Set<String> STARTED = ConcurrentHashMap.newKeySet();
    private static String name;
    private static MongoClient client;
    private static MongoDatabase db;

    private interface Work {
        void run() throws Exception;
    }

    private static final class Counter implements CommandListener {
        @Override public void commandStarted(CommandStartedEvent event) {
            STARTED.add(event.getCommandName());
        }

        @Override public void commandSucceeded(CommandSucceededEvent event) { }

        @Override public void commandFailed(CommandFailedEvent event) { }
    }

    private static int codeOf(Work work) throws Exception {
        try {
            work.run();
        } catch (MongoException error) {
            return error.getCode();
        }
        return 0;
    }

    /** A command's error as the server words it; the driver adds the server's address, and the reply with its times. */
    private static String textOf(Work work) throws Exception {
        try {
            work.run();
        } catch (MongoException error) {
            return error.getCode() + " " + error.getMessage().replaceAll(" on server [^ ]+\\. The full response.*", "");
        }
        return "no error";
    }

    private static Document of(String key, Object value) {
        return new Document(key, value);
    }

    private static MongoCollection<Document> created(String collection) {
        db.runCommand(of("create", collection));
        return db.getCollection(collection);
    }

    private static void crud() throws Exception {
        MongoCollection<Document> c = db.getCollection("crud");
        List<Document> documents = new ArrayList<>();
        for (int number = 0; number < 300; number++) {
            documents.add(of("_id", number).append("x", number % 7));
        }
        c.insertMany(documents);
        FACTS.put("found", c.find().batchSize(50).sort(of("_id", 1)).into(new ArrayList<>()).size());
        FACTS.put("updated", c.updateMany(of("x", 3), of("$inc", of("x", 100))).getModifiedCount());
        FACTS.put("replaced", c.findOneAndReplace(of("_id", 1), of("y", 1),
            new FindOneAndReplaceOptions().returnDocument(ReturnDocument.AFTER)));
        FACTS.put("deleted", c.deleteMany(Filters.gt("x", 100)).getDeletedCount());
        BulkWriteResult bulk = c.bulkWrite(Arrays.asList(
            new InsertOneModel<>(of("_id", 1000)),
            new UpdateOneModel<>(of("_id", 1000), of("$set", of("a", 1))),
            new ReplaceOneModel<>(of("_id", 1001), of("b", 1), new UpdateOptions().upsert(true)),
            new DeleteOneModel<>(of("_id", 1000))));
        FACTS.put("bulk", Arrays.asList(bulk.getInsertedCount(), bulk.getModifiedCount(), bulk.getUpserts().size(),
            bulk.getDeletedCount()));
        FACTS.put("duplicate", codeOf(() -> c.insertOne(of("_id", 1))));
        c.withWriteConcern(WriteConcern.UNACKNOWLEDGED).insertOne(of("_id", 2000));
        FACTS.put("count", c.count(Filters.lt("_id", 1500)));
        FACTS.put("groups", c.aggregate(Arrays.asList(of("$group", of("_id", "$x").append("n", of("$sum", 1))),
            of("$sort", of("_id", 1)))).batchSize(2).into(new ArrayList<>()));
    }

    private static void sessions() {
        try (ClientSession session = client.startSession(ClientSessionOptions.builder().build())) {
            db.getCollection("crud").insertOne(session, of("_id", "in a session"));
            FACTS.put("session", db.getCollection("crud").find(session, of("_id", "in a session")).first());
        }
    }

    private static void gridfs() throws Exception {
        GridFSBucket bucket = GridFSBuckets.create(db);
        byte[] contents = "tailrace".repeat(90_000).getBytes("UTF-8");
        ObjectId id = bucket.uploadFromStream("file", new ByteArrayInputStream(contents));
        ByteArrayOutputStream back = new ByteArrayOutputStream();
        bucket.downloadToStream(id, back);
        FACTS.put("gridfs", Arrays.equals(contents, back.toByteArray()));
    }

    private static void indexes() {
        MongoCollection<Document> c = db.getCollection("crud");
        String made = c.createIndex(of("x", 1).append("y", -1));
        List<String> names = new ArrayList<>();
        c.listIndexes().forEach((java.util.function.Consumer<Document>) index -> names.add(index.getString("name")));
        FACTS.put("indexes", names);
        c.dropIndex(made);
    }

    private static void failing(String command, Document failure, Work work) throws Exception {
        MongoDatabase admin = client.getDatabase("admin");
        Document data = of("failCommands", Arrays.asList(command)).append("appName", name);
        data.putAll(failure);
        admin.runCommand(of("configureFailPoint", "failCommand").append("mode", of("times", 1)).append("data", data));
        try {
            work.run();
        } finally {
            admin.runCommand(of("configureFailPoint", "failCommand").append("mode", "off"));
        }
    }

    private static void retries() throws Exception {
        MongoCollection<Document> c = db.getCollection("retries");
        failing("insert", of("closeConnection", true), () -> c.insertOne(of("_id", 1)));
        FACTS.put("retried write", c.count());
        failing("insert", of("errorCode", 2), () -> FACTS.put("not retried", codeOf(() -> c.insertOne(of("_id", 2)))));
    }

    private static MongoCursor<BsonDocument> opened(ChangeStreamIterable<Document> stream) {
        return stream.maxAwaitTime(200, TimeUnit.MILLISECONDS).withDocumentClass(BsonDocument.class).iterator();
    }

    private static List<BsonDocument> take(MongoCursor<BsonDocument> stream, int count) {
        List<BsonDocument> events = new ArrayList<>();
        while (events.size() < count) {
            events.add(stream.next());
        }
        return events;
    }

    private static List<Object> each(String field, List<BsonDocument> events) {
        List<Object> found = new ArrayList<>();
        events.forEach(event -> found.add(event.get(field)));
        return found;
    }

    private static void watching() {
        MongoCollection<Document> c = created("watched");
        MongoCursor<BsonDocument> stream = opened(c.watch().fullDocument(FullDocument.UPDATE_LOOKUP));
        MongoCursor<BsonDocument> few = opened(
            c.watch(Arrays.asList(Aggregates.match(Filters.ne("operationType", "update")))).batchSize(1));
        FACTS.put("quiet", stream.tryNext() == null);
        c.insertOne(of("_id", 1).append("a", 1));
        c.updateOne(of("_id", 1), of("$set", of("a", 2)));
        c.replaceOne(of("_id", 1), of("b", 1));
        List<BsonDocument> events = take(stream, 3);
        c.deleteOne(of("_id", 1));
        events.addAll(take(stream, 1));
        FACTS.put("watched", each("operationType", events));
        FACTS.put("keys", each("documentKey", events));
        FACTS.put("described", each("updateDescription", events));
        FACTS.put("looked up", events.get(1).get("fullDocument"));
        FACTS.put("few", each("operationType", take(few, 3)));
        stream.close();
        few.close();
    }

    private static void resuming() throws Exception {
        MongoCollection<Document> c = created("resumed");
        MongoCursor<BsonDocument> first = opened(c.watch());
        c.insertMany(Arrays.asList(of("_id", 1), of("_id", 2), of("_id", 3), of("_id", 4)));
        BsonDocument token = take(first, 1).get(0).getDocument("_id");
        first.close();
        MongoCursor<BsonDocument> again = opened(c.watch().resumeAfter(token));
        FACTS.put("resumeAfter", each("documentKey", take(again, 3)));
        again.close();
        FACTS.put("unknown stage", textOf(() -> opened(c.watch(Arrays.asList(of("$nothing", 1))))));
        FACTS.put("no token", textOf(() -> opened(c.watch().resumeAfter(BsonDocument.parse("{_data: 'zz'}")))));
        for (Document failure : Arrays.asList(of("closeConnection", true), of("errorCode", 43), of("errorCode", 10107),
            of("errorCode", 280))) {
            String label = failure.toJson();
            MongoCursor<BsonDocument> stream = opened(c.watch());
            // This version resumes only from an event's token. Without one it would start anew, after the failure.
            c.insertOne(of("_id", "before " + label));
            take(stream, 1);
            failing("getMore", failure, () -> {
                c.insertOne(of("_id", label));
                FACTS.put("told of " + label, codeOf(() -> FACTS.put(label, each("documentKey", take(stream, 1)))));
            });
            stream.close();
        }
    }

    private static void invalidating() throws Exception {
        MongoCollection<Document> c = created("invalidated");
        MongoCursor<BsonDocument> stream = opened(c.watch());
        c.insertOne(of("_id", 1));
        c.drop();
        List<BsonDocument> events = take(stream, 3);
        FACTS.put("invalidated", each("operationType", events));
        BsonDocument token = events.get(2).getDocument("_id");
        FACTS.put("resumed after", codeOf(() -> opened(c.watch().resumeAfter(token)).next()));
    }

    private static void part(String label, Work work) throws Exception {
        System.err.println(label); // so that whoever waits in vain sees where it is
        work.run();
    }

    public static void main(String[] arguments) throws Exception {
        Logger.getLogger("org.mongodb.driver").setLevel(Level.SEVERE);
        name = arguments[1];
        client = new MongoClient(new MongoClientURI(arguments[0], MongoClientOptions.builder()
            .applicationName(name).addCommandListener(new Counter()).heartbeatFrequency(1000).retryWrites(true)
            .writeConcern(WriteConcern.MAJORITY)));
        db = client.getDatabase(name);
        db.drop();
        part("crud", JavaDriver::crud);
        part("sessions", JavaDriver::sessions);
        part("gridfs", JavaDriver::gridfs);
        part("indexes", JavaDriver::indexes);
        part("retries", JavaDriver::retries);
        part("watching", JavaDriver::watching);
        part("resuming", JavaDriver::resuming);
        part("invalidating", JavaDriver::invalidating);
        List<Boolean> monitored = new ArrayList<>();
        for (String command : Arrays.asList("insert", "find", "getMore", "aggregate", "createIndexes")) {
            monitored.add(STARTED.contains(command));
        }
        FACTS.put("monitored", monitored);
        db.drop();
        client.close();
        System.out.println(FACTS.toJson());
    }
}
