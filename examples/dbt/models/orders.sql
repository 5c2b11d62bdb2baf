-- The last change of each key. An update is two rows, before and after; a table that was rewritten has both a delete and
-- an insert of a key in one version.
with last as (
    select *
    from {{ ref('order_changes') }}
    where _change_type <> 'update_preimage'
    qualify row_number() over (
        partition by _key order by _commit_version desc, _change_type = 'delete'
    ) = 1
)
select _key, status, cents, _changed from last where _change_type <> 'delete'
