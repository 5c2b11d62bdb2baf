/* What the C driver does with a deployment, as facts to compare: a line each on standard output.
 *
 *   c_driver URI NAME
 *
 * NAME is part of the database's name and the application's, so that fail points affect this program alone.
 */
#include <mongoc/mongoc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static mongoc_client_t *client;
static const char *name;
static int commands;

static void fail (const char *what, const bson_error_t *error)
{
   printf ("error: %s: %s\n", what, error->message);
   exit (1);
}

static void started (const mongoc_apm_command_started_t *event)
{
   commands++;
}

static void run (const char *database, bson_t *command)
{
   bson_error_t error;
   bson_t reply;
   if (!mongoc_client_command_simple (client, database, command, NULL, &reply, &error)) {
      fail ("command", &error);
   }
   bson_destroy (&reply);
   bson_destroy (command);
}

static void insert (mongoc_collection_t *c, int id, const bson_t *opts)
{
   bson_error_t error;
   bson_t *document = BCON_NEW ("_id", BCON_INT32 (id));
   if (!mongoc_collection_insert_one (c, document, opts, NULL, &error)) {
      fail ("insert", &error);
   }
   bson_destroy (document);
}

static int64_t count (mongoc_collection_t *c)
{
   bson_t filter = BSON_INITIALIZER;
   bson_error_t error;
   int64_t found = mongoc_collection_count_documents (c, &filter, NULL, NULL, NULL, &error);
   if (found < 0) {
      fail ("count", &error);
   }
   return found;
}

/* Print the operations of the next events, and keep the first one's and the last one's token. */
static void take (const char *label, mongoc_change_stream_t *stream, int wanted, bson_t *first, bson_t *last)
{
   const bson_t *event;
   const bson_t *broken;
   bson_error_t error;
   int taken = 0;
   printf ("%s:", label);
   for (int look = 0; look < 1000 && taken < wanted; look++) { /* each waits */
      while (taken < wanted && mongoc_change_stream_next (stream, &event)) {
         bson_iter_t at;
         if (bson_iter_init_find (&at, event, "operationType")) {
            printf (" %s", bson_iter_utf8 (&at, NULL));
         }
         taken++;
         if (bson_iter_init_find (&at, event, "_id")) {
            uint32_t size;
            const uint8_t *data;
            bson_t token;
            bson_iter_document (&at, &size, &data);
            bson_init_static (&token, data, size);
            if (taken == 1 && first) {
               bson_copy_to (&token, first);
            }
            if (taken == wanted && last) {
               bson_copy_to (&token, last);
            }
         }
      }
      if (mongoc_change_stream_error_document (stream, &error, &broken)) {
         printf (" error %d", error.code);
         break;
      }
   }
   printf ("\n");
}

static bson_t *options (const char *extra, const bson_t *token)
{
   bson_t *opts = BCON_NEW ("maxAwaitTimeMS", BCON_INT32 (200));
   if (extra) {
      BSON_APPEND_DOCUMENT (opts, extra, token);
   }
   return opts;
}

static void crud (mongoc_database_t *db)
{
   bson_error_t error;
   mongoc_collection_t *c = mongoc_database_get_collection (db, "crud");
   mongoc_bulk_operation_t *bulk = mongoc_collection_create_bulk_operation_with_opts (c, NULL);
   for (int id = 0; id < 300; id++) {
      bson_t *document = BCON_NEW ("_id", BCON_INT32 (id), "x", BCON_INT32 (id % 7));
      mongoc_bulk_operation_insert (bulk, document);
      bson_destroy (document);
   }
   bson_t *filter = BCON_NEW ("x", BCON_INT32 (3));
   bson_t *update = BCON_NEW ("$inc", "{", "x", BCON_INT32 (100), "}");
   mongoc_bulk_operation_update (bulk, filter, update, false);
   bson_t reply;
   if (!mongoc_bulk_operation_execute (bulk, &reply, &error)) {
      fail ("bulk", &error);
   }
   bson_iter_t at;
   bson_iter_init_find (&at, &reply, "nInserted");
   printf ("inserted: %d", bson_iter_int32 (&at));
   bson_iter_init_find (&at, &reply, "nModified");
   printf (" modified: %d\n", bson_iter_int32 (&at));
   bson_t all = BSON_INITIALIZER;
   bson_t *opts = BCON_NEW ("batchSize", BCON_INT32 (50));
   mongoc_cursor_t *cursor = mongoc_collection_find_with_opts (c, &all, opts, NULL);
   const bson_t *document;
   int found = 0;
   while (mongoc_cursor_next (cursor, &document)) {
      found++;
   }
   printf ("found: %d\n", found);
   mongoc_cursor_destroy (cursor);
   bson_t *index = BCON_NEW ("createIndexes", "crud", "indexes", "[", "{", "key", "{", "x", BCON_INT32 (1), "}", "name", "by x", "}", "]");
   run (name, index);
   bson_destroy (opts);
   bson_destroy (filter);
   bson_destroy (update);
   bson_destroy (&reply);
   mongoc_bulk_operation_destroy (bulk);
   mongoc_collection_destroy (c);
}

static void transactions (mongoc_database_t *db)
{
   bson_error_t error;
   bson_t opts = BSON_INITIALIZER;
   bson_t reply;
   run (name, BCON_NEW ("create", "transactions"));
   mongoc_collection_t *c = mongoc_database_get_collection (db, "transactions");
   mongoc_client_session_t *session = mongoc_client_start_session (client, NULL, &error);
   if (!session || !mongoc_client_session_start_transaction (session, NULL, &error) ||
       !mongoc_client_session_append (session, &opts, &error)) {
      fail ("transaction", &error);
   }
   insert (c, 1, &opts);
   insert (c, 2, &opts);
   printf ("outside: %d\n", (int) count (c));
   if (!mongoc_client_session_commit_transaction (session, &reply, &error)) {
      fail ("commit", &error);
   }
   printf ("committed: %d\n", (int) count (c));
   bson_destroy (&reply);
   bson_destroy (&opts);
   mongoc_client_session_destroy (session);
   mongoc_collection_destroy (c);
}

static void gridfs (mongoc_database_t *db)
{
   bson_error_t error;
   bson_value_t id;
   static char contents[700000];
   static char back[700000];
   memset (contents, 't', sizeof contents);
   mongoc_gridfs_bucket_t *bucket = mongoc_gridfs_bucket_new (db, NULL, NULL, &error);
   mongoc_stream_t *upload = mongoc_gridfs_bucket_open_upload_stream (bucket, "file", NULL, &id, &error);
   mongoc_stream_write (upload, contents, sizeof contents, 0);
   mongoc_stream_close (upload);
   mongoc_stream_destroy (upload);
   mongoc_stream_t *download = mongoc_gridfs_bucket_open_download_stream (bucket, &id, &error);
   mongoc_stream_read (download, back, sizeof back, sizeof back, 0);
   printf ("gridfs: %s\n", memcmp (contents, back, sizeof back) ? "differs" : "the same");
   mongoc_stream_destroy (download);
   mongoc_gridfs_bucket_destroy (bucket);
   bson_value_destroy (&id);
}

static void watching (mongoc_database_t *db)
{
   bson_t pipeline = BSON_INITIALIZER;
   bson_t first, last, second;
   run (name, BCON_NEW ("create", "watched"));
   mongoc_collection_t *c = mongoc_database_get_collection (db, "watched");
   bson_t *plain = options (NULL, NULL);
   mongoc_change_stream_t *stream = mongoc_collection_watch (c, &pipeline, plain);
   mongoc_change_stream_t *of_database = mongoc_database_watch (db, &pipeline, plain);
   bson_t *here = BCON_NEW ("pipeline", "[", "{", "$match", "{", "ns.db", BCON_UTF8 (name), "}", "}", "]");
   mongoc_change_stream_t *of_all = mongoc_client_watch (client, here, plain);
   for (int id = 1; id <= 4; id++) {
      insert (c, id, NULL);
   }
   take ("watched", stream, 4, &first, &last);
   take ("database", of_database, 4, NULL, NULL);
   take ("cluster", of_all, 4, NULL, NULL);
   bson_t *after = options ("resumeAfter", &first);
   mongoc_change_stream_t *resumed = mongoc_collection_watch (c, &pipeline, after);
   take ("resumed", resumed, 3, NULL, NULL);

   run ("admin", BCON_NEW ("configureFailPoint", "failCommand", "mode", "{", "times", BCON_INT32 (1), "}", "data", "{",
                           "failCommands", "[", "getMore", "]", "appName", BCON_UTF8 (name), "errorCode", BCON_INT32 (10107),
                           "errorLabels", "[", "ResumableChangeStreamError", "]", "}"));
   insert (c, 5, NULL);
   take ("resumed by the driver", stream, 1, NULL, NULL);
   run ("admin", BCON_NEW ("configureFailPoint", "failCommand", "mode", "off"));

   bson_error_t error;
   mongoc_collection_drop (c, &error);
   take ("invalidated", stream, 2, NULL, &second);
   bson_t *start = options ("startAfter", &second);
   mongoc_change_stream_t *again = mongoc_collection_watch (c, &pipeline, start);
   const bson_t *none;
   mongoc_change_stream_next (again, &none);
   insert (c, 6, NULL);
   take ("started after", again, 1, NULL, NULL);
   bson_t *wrong = options ("resumeAfter", &second);
   mongoc_change_stream_t *refused = mongoc_collection_watch (c, &pipeline, wrong);
   take ("refused", refused, 1, NULL, NULL);

   mongoc_change_stream_t *streams[] = {stream, of_database, of_all, resumed, again, refused};
   for (size_t at = 0; at < sizeof streams / sizeof *streams; at++) {
      mongoc_change_stream_destroy (streams[at]);
   }
   bson_t *documents[] = {plain, here, after, start, wrong};
   for (size_t at = 0; at < sizeof documents / sizeof *documents; at++) {
      bson_destroy (documents[at]);
   }
   bson_destroy (&first);
   bson_destroy (&last);
   bson_destroy (&second);
   mongoc_collection_destroy (c);
}

int main (int argc, char **argv)
{
   bson_error_t error;
   if (argc != 3) {
      return 2;
   }
   name = argv[2];
   setvbuf (stdout, NULL, _IOLBF, 0);
   mongoc_init ();
   mongoc_uri_t *uri = mongoc_uri_new_with_error (argv[1], &error);
   if (!uri) {
      fail ("uri", &error);
   }
   client = mongoc_client_new_from_uri (uri);
   mongoc_client_set_appname (client, name);
   mongoc_client_set_error_api (client, MONGOC_ERROR_API_VERSION_2);
   mongoc_apm_callbacks_t *callbacks = mongoc_apm_callbacks_new ();
   mongoc_apm_set_command_started_cb (callbacks, started);
   mongoc_client_set_apm_callbacks (client, callbacks, NULL);
   mongoc_database_t *db = mongoc_client_get_database (client, name);
   mongoc_database_drop (db, &error);
   crud (db);
   transactions (db);
   gridfs (db);
   watching (db);
   mongoc_database_drop (db, &error);
   printf ("monitored: %s\n", commands > 20 ? "yes" : "no");
   mongoc_apm_callbacks_destroy (callbacks);
   mongoc_database_destroy (db);
   mongoc_client_destroy (client);
   mongoc_uri_destroy (uri);
   mongoc_cleanup ();
   return 0;
}
