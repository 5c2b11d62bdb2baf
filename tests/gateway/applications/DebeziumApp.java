// Debezium's connector for MongoDB, embedded: prints each record on a line, until standard input ends.
//   java -cp 'libs/*' DebeziumApp.java URI NAME OFFSETS
import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.format.Json;
import java.util.Properties;
import java.util.concurrent.Executors;

public class DebeziumApp {
  public static void main(String[] arguments) throws Exception {
    Properties options = new Properties();
    options.setProperty("name", "engine");
    options.setProperty("connector.class", "io.debezium.connector.mongodb.MongoDbConnector");
    options.setProperty("mongodb.connection.string", arguments[0]);
    options.setProperty("topic.prefix", "t");
    options.setProperty("database.include.list", arguments[1]);
    options.setProperty("capture.mode", "change_streams_update_full_with_pre_image");
    options.setProperty("capture.mode.full.update.type", "lookup");
    options.setProperty("snapshot.mode", "initial");
    options.setProperty("cursor.max.await.time.ms", "200");
    options.setProperty("poll.interval.ms", "50");
    options.setProperty("provide.transaction.metadata", "false");
    options.setProperty("offset.storage", "org.apache.kafka.connect.storage.FileOffsetBackingStore");
    options.setProperty("offset.storage.file.filename", arguments[2]);
    options.setProperty("offset.flush.interval.ms", "200");
    options.setProperty("key.converter.schemas.enable", "false");
    options.setProperty("value.converter.schemas.enable", "false");
    var engine =
        DebeziumEngine.create(Json.class)
            .using(options)
            .using((boolean success, String message, Throwable error) -> {
              if (!success) {
                System.err.println("the engine ended: " + message + " " + error);
                System.exit(1);
              }
            })
            .notifying((ChangeEvent<String, String> record) -> {
              synchronized (System.out) {
                System.out.println(record.destination() + "\t" + record.key() + "\t" + record.value());
                System.out.flush();
              }
            })
            .build();
    var executor = Executors.newSingleThreadExecutor();
    executor.execute(engine);
    while (System.in.read() >= 0) {}
    engine.close();
    executor.shutdown();
    System.exit(0);
  }
}
