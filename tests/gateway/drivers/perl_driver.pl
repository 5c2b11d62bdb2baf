# What Perl's driver does with a deployment, as facts to compare: JSON on standard output.
#
#   perl perl_driver.pl URI NAME
#
# NAME is part of the database's name and the application's, so that fail points affect this program alone.
use strict;
use warnings;
use JSON::PP;
use MongoDB;
use Tie::IxHash;

my ( $uri, $name ) = @ARGV;
my %facts;
my %started;
my $client = MongoDB->connect(
    $uri,
    {
        app_name           => $name,
        # Without this a look-up may read what a majority had before the last write.
        w                  => 'majority',
        wtimeout           => 100_000,
        monitoring_callback => sub { my $event = shift; $started{ $event->{commandName} }++ if $event->{type} eq 'command_started' },
    }
);
my $db = $client->get_database($name);

sub ordered { return Tie::IxHash->new(@_) }

sub code_of {
    my $work = shift;
    my $done = eval { $work->(); 1 };
    return 0 if $done;
    my $error = $@;
    return ref $error && $error->can('code') ? $error->code + 0 : "$error";
}

sub take {
    my ( $stream, $count ) = @_;
    my @events;
    for ( 1 .. 1000 ) {    # each look waits
        my $event = $stream->next;
        push @events, $event if defined $event;
        last if @events == $count;
    }
    return @events;
}

sub crud {
    my $c = $db->get_collection('crud');
    $c->insert_many( [ map { { _id => $_, x => $_ % 7 } } 0 .. 299 ] );
    my @found = $c->find( {}, { batchSize => 50 } )->all;
    $facts{found}    = scalar @found;
    $facts{updated}  = $c->update_many( { x => 3 }, { '$inc' => { x => 100 } } )->modified_count + 0;
    $facts{replaced} = $c->find_one_and_replace( { _id => 1 }, { y => 1 }, { returnDocument => 'after' } )->{y} + 0;
    $facts{deleted}  = $c->delete_many( { x => { '$gt' => 100 } } )->deleted_count + 0;
    my $bulk = $c->initialize_ordered_bulk_op;
    $bulk->insert_one( { _id => 1000 } );
    $bulk->find( { _id => 1000 } )->update_one( { '$set' => { a => 1 } } );
    $bulk->find( { _id => 1001 } )->upsert->replace_one( { b => 1 } );
    $bulk->find( { _id => 1000 } )->delete_one;
    my $result = $bulk->execute;
    $facts{bulk} =
      [ map { $_ + 0 } $result->inserted_count, $result->modified_count, $result->upserted_count, $result->deleted_count ];
    $facts{duplicate} = code_of( sub { $c->insert_one( { _id => 1 } ) } );
    $facts{count}     = $c->count_documents( {} ) + 0;
}

sub transactions {
    $db->run_command( [ create => 'transactions' ] );
    my $c       = $db->get_collection('transactions');
    my $session = $client->start_session;
    $session->start_transaction;
    $c->insert_one( { _id => 1 }, { session => $session } );
    $c->insert_one( { _id => 2 }, { session => $session } );
    $facts{outside} = $c->count_documents( {} ) + 0;
    $session->commit_transaction;
    $session->start_transaction;
    $c->insert_one( { _id => 3 }, { session => $session } );
    $session->abort_transaction;
    $session->end_session;
    $facts{committed} = $c->count_documents( {} ) + 0;
}

sub gridfs {
    my $bucket   = $db->gfs;
    my $contents = 'tailrace' x 90_000;
    my $upload   = $bucket->open_upload_stream('file');
    $upload->print($contents);
    $upload->close;
    my $download = $bucket->open_download_stream( $upload->id );
    my $back     = do { local $/; $download->readline };
    $facts{gridfs} = $back eq $contents ? JSON::PP::true : JSON::PP::false;
}

sub indexes {
    my $view = $db->get_collection('crud')->indexes;
    my $made = $view->create_one( ordered( x => 1, y => -1 ) );
    $facts{indexes} = [ sort map { $_->{name} } $view->list->all ];
    $view->drop_one($made);
}

sub failing {
    my ( $commands, $work, %failure ) = @_;
    my $admin = $client->get_database('admin');
    $admin->run_command(
        [
            configureFailPoint => 'failCommand',
            mode               => { times => 1 },
            data => { failCommands => $commands, appName => $name, %failure }
        ]
    );
    my $result = eval { $work->() };
    my $error  = $@;
    $admin->run_command( [ configureFailPoint => 'failCommand', mode => 'off' ] );
    die $error if $error;
    return $result;
}

sub retries {
    my $c = $db->get_collection('retries');
    $facts{retried_write} = failing(
        ['insert'], sub { $c->insert_one( { _id => 1 } )->inserted_id + 0 },
        errorCode => 91, errorLabels => ['RetryableWriteError']
    );
    $facts{retried_read} = failing( ['find'], sub { $c->find_one( { _id => 1 } )->{_id} + 0 }, errorCode => 91 );
}

sub watching {
    $db->run_command( [ create => 'watched' ] );
    my $c       = $db->get_collection('watched');
    my @streams = (
        $c->watch( [], { fullDocument => 'updateLookup', maxAwaitTimeMS => 200 } ),
        $db->watch( [ { '$match' => { operationType => { '$ne' => 'update' } } } ], { maxAwaitTimeMS => 200, batchSize => 2 } ),
        $client->watch( [ { '$match' => { 'ns.db' => $name } } ], { maxAwaitTimeMS => 200 } ),
    );
    $c->insert_one( { _id => 1, a => 1 } );
    $c->update_one( { _id => 1 }, { '$set' => { a => 2 } } );
    $c->replace_one( { _id => 1 }, { b => 1 } );
    my @events = take( $streams[0], 3 );
    $facts{looked_up} = $events[1]{fullDocument}{b} + 0;
    $c->delete_one( { _id => 1 } );
    $facts{watched}  = [ ( map { $_->{operationType} } @events, take( $streams[0], 1 ) ) ];
    $facts{database} = [ map { $_->{operationType} } take( $streams[1], 3 ) ];
    $facts{cluster}  = [ map { $_->{operationType} } take( $streams[2], 4 ) ];
    $facts{token}    = defined $streams[0]->get_resume_token ? JSON::PP::true : JSON::PP::false;
}

sub resuming {
    $db->run_command( [ create => 'resumed' ] );
    my $c     = $db->get_collection('resumed');
    my $first = $c->watch( [], { maxAwaitTimeMS => 200 } );
    $c->insert_many( [ map { { _id => $_ } } 1 .. 4 ] );
    my ($event) = take( $first, 1 );
    for my $option ( 'resumeAfter', 'startAfter' ) {
        my $stream = $c->watch( [], { $option => $event->{_id}, maxAwaitTimeMS => 200 } );
        $facts{$option} = [ map { $_->{documentKey}{_id} + 0 } take( $stream, 3 ) ];
    }
    my $timed = $c->watch( [], { startAtOperationTime => $event->{clusterTime}, maxAwaitTimeMS => 200 } );
    $facts{timed} = [ map { $_->{documentKey}{_id} + 0 } take( $timed, 4 ) ];
    my $stream = $c->watch( [], { maxAwaitTimeMS => 200 } );
    $c->insert_one( { _id => 5 } );
    take( $stream, 1 );
    $facts{resumed} = failing(
        ['getMore'],
        sub {
            $c->insert_one( { _id => 6 } );
            my ($one) = take( $stream, 1 );
            return $one->{documentKey}{_id} + 0;
        },
        closeConnection => JSON::PP::true
    );
    $facts{unknown_stage} = code_of( sub { $c->watch( [ { '$nothing' => 1 } ] ) } );
}

sub invalidating {
    $db->run_command( [ create => 'invalidated' ] );
    my $c      = $db->get_collection('invalidated');
    my $stream = $c->watch( [], { maxAwaitTimeMS => 200 } );
    $c->insert_one( { _id => 1 } );
    $c->drop;
    my @events = take( $stream, 3 );
    $facts{invalidated} = [ map { $_->{operationType} } @events ];
    my $again = $c->watch( [], { startAfter => $events[2]{_id}, maxAwaitTimeMS => 200 } );
    $c->insert_one( { _id => 2 } );
    $facts{after_invalidate} = [ map { $_->{operationType} } take( $again, 1 ) ];
    $facts{resumed_after} = code_of( sub { $c->watch( [], { resumeAfter => $events[2]{_id} } ) } );
}

my $done = eval {
    $db->drop;
    $facts{topology} = $client->topology_type;
    my %parts = (
        crud => \&crud, transactions => \&transactions, gridfs => \&gridfs, indexes => \&indexes, retries => \&retries,
        watching => \&watching, resuming => \&resuming, invalidating => \&invalidating,
    );
    for my $part (qw(crud transactions gridfs indexes retries watching resuming invalidating)) {
        print STDERR "$part\n";    # so that whoever waits in vain sees where it is
        $parts{$part}->();
    }
    $facts{monitored} = [ map { $started{$_} ? 1 : 0 } qw(insert find getMore aggregate commitTransaction createIndexes) ];
    $db->drop;
    1;
};
$facts{error} = "$@" unless $done;
print JSON::PP->new->canonical->pretty->encode( \%facts );
exit( $done ? 0 : 1 );
