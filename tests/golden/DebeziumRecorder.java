// Debezium's connector for MongoDB, embedded: prints each record as each of Connect's converters writes it.
//   java -cp 'libs/*' DebeziumRecorder.java < OPTIONS
// OPTIONS are the connector's, one NAME=VALUE a line, up to an empty line; it runs until standard input ends.
import io.debezium.converters.CloudEventsConverter;
import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.embedded.Connect;
import io.confluent.connect.avro.AvroConverter;
import io.confluent.connect.protobuf.ProtobufConverter;
import io.confluent.kafka.schemaregistry.client.MockSchemaRegistryClient;
import io.confluent.kafka.schemaregistry.protobuf.ProtobufSchemaProvider;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.Executors;
import org.apache.kafka.connect.json.JsonConverter;
import org.apache.kafka.connect.source.SourceRecord;
import org.apache.kafka.connect.storage.Converter;

public class DebeziumRecorder {
  static String base64(byte[] bytes) {
    return bytes == null ? "null" : Base64.getEncoder().encodeToString(bytes);
  }

  public static void main(String[] arguments) throws Exception {
    Properties options = new Properties();
    var in = new BufferedReader(new InputStreamReader(System.in));
    for (String line = in.readLine(); line != null && !line.isEmpty(); line = in.readLine()) {
      int at = line.indexOf('=');
      options.setProperty(line.substring(0, at), line.substring(at + 1));
    }
    var avro = new MockSchemaRegistryClient();
    var protobuf = new MockSchemaRegistryClient(List.of(new ProtobufSchemaProvider()));
    Map<String, Converter[]> converters = new LinkedHashMap<>();
    for (String name : new String[] {"json", "schemas", "avro", "protobuf", "cloudevents"}) {
      Converter[] pair = new Converter[2];
      for (int side = 0; side < 2; side++) {
        Converter converter = switch (name) {
          case "avro" -> new AvroConverter(avro);
          case "protobuf" -> new ProtobufConverter(protobuf);
          case "cloudevents" -> side == 0 ? new JsonConverter() : new CloudEventsConverter();
          default -> new JsonConverter();
        };
        Map<String, Object> settings = new LinkedHashMap<>();
        settings.put("schemas.enable", String.valueOf(name.equals("schemas")));
        if (name.equals("avro") || name.equals("protobuf")) {
          settings.put("schema.registry.url", "mock://" + name);
        }
        if (name.equals("protobuf")) {
          settings.put("optional.for.nullables", "true");
        }
        if (name.equals("cloudevents")) {
          settings.put("json.schemas.enable", "false");
        }
        converter.configure(settings, side == 0);
        pair[side] = converter;
      }
      converters.put(name, pair);
    }
    var engine =
        DebeziumEngine.create(Connect.class)
            .using(options)
            .using((boolean success, String message, Throwable error) -> {
              if (!success) {
                System.err.println("the engine ended: " + message + " " + error);
                if (error != null) error.printStackTrace();
                System.exit(1);
              }
            })
            .notifying((ChangeEvent<SourceRecord, SourceRecord> event) -> {
              SourceRecord record = event.value();
              var line = new StringBuilder("record\t" + record.topic() + "\t" + record.sourceOffset());
              for (var entry : converters.entrySet()) {
                String key, value;
                try {
                  key = base64(entry.getValue()[0].fromConnectData(record.topic(), record.keySchema(), record.key()));
                  value = base64(entry.getValue()[1].fromConnectData(record.topic(), record.valueSchema(), record.value()));
                } catch (Throwable error) {
                  error.printStackTrace();
                  key = "error";
                  value = base64(String.valueOf(error).getBytes());
                }
                line.append("\t").append(entry.getKey()).append(" ").append(key).append(" ").append(value);
              }
              synchronized (System.out) {
                System.out.println(line);
                System.out.flush();
              }
            })
            .build();
    var executor = Executors.newSingleThreadExecutor();
    executor.execute(engine);
    while (in.readLine() != null) {}
    engine.close();
    for (String name : new String[] {"avro", "protobuf"}) {
      var client = name.equals("avro") ? avro : protobuf;
      for (String subject : client.getAllSubjects()) {
        for (int version : client.getAllVersions(subject)) {
          var found = client.getSchemaMetadata(subject, version);
          System.out.println("schema\t" + name + "\t" + subject + "\t" + version + "\t" + found.getId() + "\t"
              + base64(found.getSchema().getBytes()));
        }
      }
    }
    System.out.flush();
    executor.shutdown();
    System.exit(0);
  }
}
