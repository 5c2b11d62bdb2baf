-- What the changes add up to is the table itself: a row here is a difference.
(select * from {{ ref('orders') }} except all select * from {{ ref('orders_as_read') }})
union all
(select * from {{ ref('orders_as_read') }} except all select * from {{ ref('orders') }})
