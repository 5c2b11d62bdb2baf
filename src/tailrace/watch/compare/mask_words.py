"""The server's own words in entries, commands and events: what a masked report may show."""

from __future__ import annotations

from typing import Final


def _words(text: str) -> frozenset[bytes]:
    return frozenset(text.encode().split())


#: Fields of events that hold nothing of a user's.
KEPT_EVENT_FIELDS: Final = _words(
    "operationType clusterTime wallTime txnNumber collectionUUID splitEvent nsType reshardingUUID"
)

#: Fields of commands, of their options and of events about them.
WORDS: Final = _words(
    """
    oldShardKey mode refineCollectionShardKey reshardCollection migrateLastChunkFromShard migrateChunkToNewShard
    fromShardId moveChunk donor recipient reshardBegin reshardBlockingWrites reshardDoneCatchUp emptycapped dbCheck
    endOfTransaction expireAfterSeconds_old
    hidden_old db coll config toShard fromShard movePrimary newPrimary collectionOptions indexOptions
    abortIndexBuild abortTransaction applyOps authorization autoIndexId background bits bucketMaxSpanSeconds
    bucketRoundingSeconds bucketSize capped caseFirst caseLevel changeStreamPreAndPostImages clusteredIndex collMod
    collation collectionOptions_old collectionUUID commitIndexBuild commitTimestamp commitTransaction count create
    createIndexes default_language deleteIndex deletedCount drop dropDatabase dropDups dropIndexes dropTarget
    enabled encryptedFields expireAfterSeconds flags from fromNs fromMigrate granularity hidden id idIndex index
    indexBuildUUID indexOptionDefaults indexOptions_old indexes isTimeseries key language_override length lsid max
    maxSize maxVariable metaField min msg multi name needsRetryImage newCollections newValue normalization ns nsType
    numInitialChunks numOrphans numRecords numericOrdering o o2 oldIndexNames op operationDescription
    operationType options
    partialFilterExpression partialTxn pipeline prepare presplitHashedZones prepareUnique prevOpTime
    previousExpireAfterSeconds recordPreImages renameCollection reshardUUID reshardingUUID
    shardCollection shardKey shardKeyPattern shardId size sparse sphereIndexVersion2d startIndexBuild stateBeforeChange
    stayTemp storageEngine strength t temp textIndexVersion timeField timeseries timeseriesBucketsMayHaveMixedSchemaData
    to toShardId toUUID fromUUID ts txnNumber type uid ui unique unset uuid v validationAction validationLevel validator
    version viewOn wall weights wildcardProjection 2dsphereIndexVersion alternate backwards locale validatedCollation
    nss tid bypassEmptyTsReplacement disallowNewDuplicateKeys
    """
)

#: Fields whose text is the name of a collection.
NAMES_A_COLLECTION: Final = _words(
    "create drop collMod createIndexes startIndexBuild commitIndexBuild abortIndexBuild dropIndexes deleteIndexes "
    "deleteIndex viewOn emptycapped convertToCapped importCollection modifyCollectionShardingIndexCatalog coll"
)

#: Fields whose value is a user's, with all names in it.
OF_USERS: Final = _words(
    "key shardKey shardKeyPattern partialFilterExpression validator weights wildcardProjection pipeline storageEngine "
    "query encryptedFields zones newShardKey oldShardKey unique_key reshardingKey timeField metaField"
)

#: Texts that are a choice of the server's.
KEPT_TEXTS: Final = _words(
    """
    _id_ simple strict moderate off error warn errorAndLog seconds minutes hours insert update replace delete create
    drop rename dropDatabase invalidate createIndexes dropIndexes modify shardCollection reshardCollection
    refineCollectionShardKey startIndexBuild abortIndexBuild commitIndexBuild migrateChunkToNewShard
    migrateLastChunkFromShard reshardBegin reshardBlockingWrites reshardDoneCatchUp reshardFinalOp endOfTransaction
    kNewShardDetected collection timeseries view i u d c n xi noop english none
    """
)
