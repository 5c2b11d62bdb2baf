// What Go's driver does with a deployment, as facts to compare: JSON on standard output.
//
//	go_driver URI NAME
//
// NAME is part of the database's name and the application's, so that fail points affect this program alone.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sort"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/bson"
	"go.mongodb.org/mongo-driver/bson/primitive"
	"go.mongodb.org/mongo-driver/event"
	"go.mongodb.org/mongo-driver/mongo"
	"go.mongodb.org/mongo-driver/mongo/gridfs"
	"go.mongodb.org/mongo-driver/mongo/options"
	"go.mongodb.org/mongo-driver/mongo/writeconcern"
)

var (
	all     = context.Background()
	facts   = map[string]interface{}{}
	name    string
	client  *mongo.Client
	db      *mongo.Database
	lock    sync.Mutex
	started = map[string]bool{}
)

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// The error's code; 0 if there is none.
func codeOf(err error) interface{} {
	var server mongo.ServerError
	if err == nil {
		return 0
	}
	for _, code := range []int{2, 9, 13, 40, 43, 91, 136, 166, 260, 280, 286, 9001, 10107, 11000, 40324} {
		if errors.As(err, &server) && server.HasErrorCode(code) {
			return code
		}
	}
	return err.Error()
}

func textOf(err error) string {
	var command mongo.CommandError
	if errors.As(err, &command) {
		return fmt.Sprintf("%d %s %s %v", command.Code, command.Name, command.Message, command.Labels)
	}
	return fmt.Sprint(err)
}

func crud() {
	c := db.Collection("crud")
	documents := []interface{}{}
	for number := 0; number < 300; number++ {
		documents = append(documents, bson.D{{"_id", number}, {"x", number % 7}})
	}
	_, err := c.InsertMany(all, documents)
	must(err)
	cursor, err := c.Find(all, bson.D{}, options.Find().SetBatchSize(50).SetSort(bson.D{{"_id", 1}}))
	must(err)
	var found []bson.M
	must(cursor.All(all, &found))
	facts["found"] = len(found)
	updated, err := c.UpdateMany(all, bson.D{{"x", 3}}, bson.D{{"$inc", bson.D{{"x", 100}}}})
	must(err)
	facts["updated"] = updated.ModifiedCount
	var replaced bson.M
	must(c.FindOneAndReplace(all, bson.D{{"_id", 1}}, bson.D{{"y", 1}},
		options.FindOneAndReplace().SetReturnDocument(options.After)).Decode(&replaced))
	facts["replaced"] = replaced["y"]
	deleted, err := c.DeleteMany(all, bson.D{{"x", bson.D{{"$gt", 100}}}})
	must(err)
	facts["deleted"] = deleted.DeletedCount
	bulk, err := c.BulkWrite(all, []mongo.WriteModel{
		mongo.NewInsertOneModel().SetDocument(bson.D{{"_id", 1000}}),
		mongo.NewUpdateOneModel().SetFilter(bson.D{{"_id", 1000}}).SetUpdate(bson.D{{"$set", bson.D{{"a", 1}}}}),
		mongo.NewReplaceOneModel().SetFilter(bson.D{{"_id", 1001}}).SetReplacement(bson.D{{"b", 1}}).SetUpsert(true),
		mongo.NewDeleteOneModel().SetFilter(bson.D{{"_id", 1000}}),
	})
	must(err)
	facts["bulk"] = []int64{bulk.InsertedCount, bulk.ModifiedCount, bulk.UpsertedCount, bulk.DeletedCount}
	_, err = c.InsertOne(all, bson.D{{"_id", 1}})
	facts["duplicate"] = codeOf(err)
	count, err := c.CountDocuments(all, bson.D{})
	must(err)
	facts["count"] = count
}

func transactions() {
	must(db.CreateCollection(all, "transactions"))
	c := db.Collection("transactions")
	must(client.UseSession(all, func(session mongo.SessionContext) error {
		_, err := session.WithTransaction(session, func(inside mongo.SessionContext) (interface{}, error) {
			return c.InsertMany(inside, []interface{}{bson.D{{"_id", 1}}, bson.D{{"_id", 2}}})
		})
		must(err)
		must(session.StartTransaction())
		_, err = c.InsertOne(session, bson.D{{"_id", 3}})
		must(err)
		outside, err := c.CountDocuments(all, bson.D{})
		must(err)
		facts["outside"] = outside
		return session.AbortTransaction(session)
	}))
	committed, err := c.CountDocuments(all, bson.D{})
	must(err)
	facts["committed"] = committed
}

func files() {
	bucket, err := gridfs.NewBucket(db)
	must(err)
	contents := []byte(strings.Repeat("tailrace", 90000))
	id, err := bucket.UploadFromStream("file", bytes.NewReader(contents))
	must(err)
	var back bytes.Buffer
	_, err = bucket.DownloadToStream(id, &back)
	must(err)
	facts["gridfs"] = bytes.Equal(contents, back.Bytes())
}

func indexes() {
	view := db.Collection("crud").Indexes()
	made, err := view.CreateOne(all, mongo.IndexModel{Keys: bson.D{{"x", 1}, {"y", -1}}})
	must(err)
	listed, err := view.ListSpecifications(all)
	must(err)
	names := []string{}
	for _, one := range listed {
		names = append(names, one.Name)
	}
	sort.Strings(names)
	facts["indexes"] = names
	_, err = view.DropOne(all, made)
	must(err)
}

func failing(command string, more bson.D, work func()) {
	admin := client.Database("admin")
	data := append(bson.D{{"failCommands", bson.A{command}}, {"appName", name}}, more...)
	must(admin.RunCommand(all, bson.D{{"configureFailPoint", "failCommand"}, {"mode", bson.D{{"times", 1}}}, {"data", data}}).Err())
	work()
	must(admin.RunCommand(all, bson.D{{"configureFailPoint", "failCommand"}, {"mode", "off"}}).Err())
}

func retries() {
	c := db.Collection("retries")
	failing("insert", bson.D{{"errorCode", 91}, {"errorLabels", bson.A{"RetryableWriteError"}}}, func() {
		made, err := c.InsertOne(all, bson.D{{"_id", 1}})
		must(err)
		facts["retried write"] = made.InsertedID
	})
	failing("find", bson.D{{"errorCode", 91}}, func() {
		var found bson.M
		must(c.FindOne(all, bson.D{{"_id", 1}}).Decode(&found))
		facts["retried read"] = found["_id"]
	})
	failing("insert", bson.D{{"errorCode", 2}}, func() {
		_, err := c.InsertOne(all, bson.D{{"_id", 2}})
		facts["not retried"] = codeOf(err)
	})
}

func quick() *options.ChangeStreamOptions {
	return options.ChangeStream().SetMaxAwaitTime(200 * time.Millisecond)
}

func take(stream *mongo.ChangeStream, count int) []bson.M {
	events := []bson.M{}
	for len(events) < count && stream.Next(all) {
		var one bson.M
		must(stream.Decode(&one))
		events = append(events, one)
	}
	must(stream.Err())
	return events
}

func kinds(events []bson.M) []interface{} {
	found := []interface{}{}
	for _, one := range events {
		found = append(found, one["operationType"])
	}
	return found
}

func keys(events []bson.M) []interface{} {
	found := []interface{}{}
	for _, one := range events {
		found = append(found, one["documentKey"].(bson.M)["_id"])
	}
	return found
}

func watching() {
	must(db.RunCommand(all, bson.D{{"create", "watched"}}).Err())
	c := db.Collection("watched")
	first, err := c.Watch(all, mongo.Pipeline{}, quick().SetFullDocument(options.UpdateLookup))
	must(err)
	second, err := db.Watch(all, mongo.Pipeline{{{"$match", bson.D{{"operationType", bson.D{{"$ne", "update"}}}}}}}, quick().SetBatchSize(2))
	must(err)
	third, err := client.Watch(all, mongo.Pipeline{{{"$match", bson.D{{"ns.db", name}}}}}, quick())
	must(err)
	facts["quiet"] = first.TryNext(all)
	facts["token"] = first.ResumeToken() != nil
	_, err = c.InsertOne(all, bson.D{{"_id", 1}, {"a", 1}})
	must(err)
	_, err = c.UpdateOne(all, bson.D{{"_id", 1}}, bson.D{{"$set", bson.D{{"a", 2}}}})
	must(err)
	_, err = c.ReplaceOne(all, bson.D{{"_id", 1}}, bson.D{{"b", 1}})
	must(err)
	events := take(first, 3)
	facts["looked up"] = events[1]["fullDocument"].(bson.M)["b"]
	_, err = c.DeleteOne(all, bson.D{{"_id", 1}})
	must(err)
	facts["watched"] = kinds(append(events, take(first, 1)...))
	facts["database"] = kinds(take(second, 3))
	facts["cluster"] = kinds(take(third, 4))
	short, cancel := context.WithTimeout(all, 300*time.Millisecond)
	facts["in time"] = third.Next(short)
	facts["out of time"] = errors.Is(third.Err(), context.DeadlineExceeded)
	cancel()
	for _, stream := range []*mongo.ChangeStream{first, second, third} {
		must(stream.Close(all))
	}
}

func resuming() {
	must(db.CreateCollection(all, "resumed"))
	c := db.Collection("resumed")
	first, err := c.Watch(all, mongo.Pipeline{}, quick())
	must(err)
	_, err = c.InsertMany(all, []interface{}{bson.D{{"_id", 1}}, bson.D{{"_id", 2}}, bson.D{{"_id", 3}}, bson.D{{"_id", 4}}})
	must(err)
	one := take(first, 1)[0]
	token := first.ResumeToken()
	for label, option := range map[string]*options.ChangeStreamOptions{
		"resumeAfter": quick().SetResumeAfter(token), "startAfter": quick().SetStartAfter(token),
	} {
		stream, err := c.Watch(all, mongo.Pipeline{}, option)
		must(err)
		facts[label] = keys(take(stream, 3))
	}
	time := one["clusterTime"].(primitive.Timestamp)
	timed, err := c.Watch(all, mongo.Pipeline{}, quick().SetStartAtOperationTime(&time))
	must(err)
	facts["startAtOperationTime"] = keys(take(timed, 4))
	_, err = c.Watch(all, mongo.Pipeline{}, quick().SetResumeAfter(token).SetStartAfter(token))
	facts["two places"] = textOf(err)
	_, err = c.Watch(all, mongo.Pipeline{{{"$nothing", 1}}}, quick())
	facts["unknown stage"] = textOf(err)
	_, err = c.Watch(all, mongo.Pipeline{}, quick().SetResumeAfter(bson.D{{"_data", "zz"}}))
	facts["no token"] = textOf(err)
	for label, failure := range map[string]bson.D{
		"cut":             {{"closeConnection", true}},
		"another primary": {{"errorCode", 10107}, {"errorLabels", bson.A{"ResumableChangeStreamError"}}},
	} {
		stream, err := c.Watch(all, mongo.Pipeline{}, quick())
		must(err)
		failing("getMore", failure, func() {
			_, err = c.InsertOne(all, bson.D{{"_id", label}})
			must(err)
			facts[label] = keys(take(stream, 1))
		})
	}
	stream, err := c.Watch(all, mongo.Pipeline{}, quick())
	must(err)
	failing("getMore", bson.D{{"errorCode", 280}}, func() {
		facts["lost"] = []interface{}{stream.Next(all), codeOf(stream.Err())}
	})
}

func invalidating() {
	must(db.CreateCollection(all, "invalidated"))
	c := db.Collection("invalidated")
	stream, err := c.Watch(all, mongo.Pipeline{}, quick())
	must(err)
	_, err = c.InsertOne(all, bson.D{{"_id", 1}})
	must(err)
	must(c.Drop(all))
	facts["invalidated"] = kinds(take(stream, 3))
	token := stream.ResumeToken()
	facts["goes on"] = stream.Next(all)
	again, err := c.Watch(all, mongo.Pipeline{}, quick().SetStartAfter(token))
	must(err)
	_, err = c.InsertOne(all, bson.D{{"_id", 2}})
	must(err)
	facts["after invalidate"] = kinds(take(again, 1))
	_, err = c.Watch(all, mongo.Pipeline{}, quick().SetResumeAfter(token))
	facts["resumed after"] = codeOf(err)
}

func main() {
	uri := os.Args[1]
	name = os.Args[2]
	monitor := &event.CommandMonitor{Started: func(_ context.Context, one *event.CommandStartedEvent) {
		lock.Lock()
		started[one.CommandName] = true
		lock.Unlock()
	}}
	var err error
	client, err = mongo.Connect(all, options.Client().ApplyURI(uri).SetAppName(name).SetMonitor(monitor).
		SetHeartbeatInterval(500*time.Millisecond).SetWriteConcern(writeconcern.New(writeconcern.WMajority())))
	must(err)
	db = client.Database(name)
	must(db.Drop(all))
	parts := []func(){crud, transactions, files, indexes, retries, watching, resuming, invalidating}
	for number, part := range parts {
		fmt.Fprintln(os.Stderr, "part", number) // so that whoever waits in vain sees where it is
		part()
	}
	monitored := []bool{}
	for _, command := range []string{"insert", "find", "getMore", "aggregate", "commitTransaction", "createIndexes"} {
		monitored = append(monitored, started[command])
	}
	facts["monitored"] = monitored
	must(db.Drop(all))
	must(client.Disconnect(all))
	text, err := json.MarshalIndent(facts, "", " ")
	must(err)
	fmt.Println(string(text))
}
