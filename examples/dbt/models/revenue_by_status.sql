-- Every row that came adds, every row that went takes away: no order needs to be looked up.
with signed as (
    select *, case when _change_type in ('insert', 'update_postimage') then 1 else -1 end as sign
    from {{ ref('order_changes') }}
)
select status, sum(sign) as orders, sum(sign * cents) as cents
from signed
group by status
having sum(sign) <> 0
