//! Calls that every class has: records, fields, and queries for objects.

use serde_json::{Map, Value, json};

use super::Context;
use super::argument::{exactly, text};
use super::filter::Filter;
use crate::database;
use crate::failure::{Answer, Failure};

/// Fields that clients may set with `set_...`, in any class that has them.
const SETTABLE: &[&str] = &[
    "name_label",
    "name_description",
    "other_config",
    "tags",
    "is_a_template",
    "affinity",
    "platform",
    "HVM_boot_params",
    "HVM_boot_policy",
    "NVRAM",
    "bootable",
    "userdevice",
    "xenstore_data",
    "sm_config",
    "blocked_operations",
    "ha_restart_priority",
    "ha_always_run",
    "appliance",
    "sharable",
    "read_only",
    "suspend_VDI",
    "purpose",
    "default_SR",
    "MTU",
    "VCPUs_max",
    "VCPUs_at_startup",
    "memory_static_max",
    "memory_static_min",
    "memory_dynamic_max",
    "memory_dynamic_min",
];

/// Answers a call that is the same for every class; `None` if it is specific to a class.
pub(super) fn call(
    context: &mut Context<'_>,
    class: &'static str,
    operation: &str,
    arguments: &[Value],
) -> Option<Answer<Value>> {
    let answer = match operation {
        "get_all" => exactly(context.method, arguments).map(|[]| all(context, class)),
        "get_all_records" => {
            exactly(context.method, arguments).map(|[]| all_records(context, class, &Filter::Constant(true)))
        }
        "get_all_records_where" => records_where(context, class, arguments),
        "get_record" => exactly(context.method, arguments)
            .and_then(|[reference]| record(context, class, reference).cloned())
            .map(Value::Object),
        "get_by_uuid" => exactly(context.method, arguments)
            .and_then(|[uuid]| context.state.database.by_uuid(class, text(uuid, "uuid")?))
            .map(|reference| json!(reference)),
        "get_by_name_label" => exactly(context.method, arguments)
            .and_then(|[name]| text(name, "label"))
            .map(|name| json!(context.state.database.having(class, "name_label", name))),
        _ => return field_call(context, class, operation, arguments),
    };
    Some(answer)
}

fn all(context: &Context<'_>, class: &'static str) -> Value {
    context
        .state
        .database
        .all(class)
        .map(|(reference, _)| json!(reference))
        .collect()
}

fn all_records(context: &Context<'_>, class: &'static str, filter: &Filter) -> Value {
    let records = context
        .state
        .database
        .all(class)
        .filter(|(_, record)| filter.holds(record));
    let records: Map<_, _> = records
        .map(|(reference, record)| (reference.clone(), Value::Object(record.clone())))
        .collect();
    Value::Object(records)
}

fn records_where(context: &Context<'_>, class: &'static str, arguments: &[Value]) -> Answer<Value> {
    let [expression] = exactly(context.method, arguments)?;
    let expression = text(expression, "expr")?;
    let filter = Filter::read(expression)
        .ok_or_else(|| Failure::internal(format!("Db_filter.Expression_error: {expression}")))?;
    Ok(all_records(context, class, &filter))
}

fn record<'a>(context: &'a Context<'_>, class: &'static str, reference: &Value) -> Answer<&'a database::Record> {
    context.state.database.get(class, text(reference, "self")?)
}

/// `get_FIELD`, `set_FIELD`, `add_to_FIELD`, `remove_from_FIELD`, `add_ITEM` and `remove_ITEM`.
fn field_call(
    context: &mut Context<'_>,
    class: &'static str,
    operation: &str,
    arguments: &[Value],
) -> Option<Answer<Value>> {
    let blank = crate::schema::blank(class);
    let is_settable = |field: &str| SETTABLE.contains(&field) && blank.contains_key(field);
    if let Some(field) = operation
        .strip_prefix("get_")
        .filter(|field| blank.contains_key(*field))
    {
        let answer = exactly(context.method, arguments)
            .and_then(|[reference]| record(context, class, reference))
            .map(|record| record.get(field).cloned().unwrap_or_default());
        return Some(answer);
    }
    if let Some(field) = operation.strip_prefix("set_").filter(|field| is_settable(field)) {
        let answer = exactly(context.method, arguments).and_then(|[reference, value]| {
            context
                .state
                .database
                .set(class, text(reference, "self")?, field, value.clone())
        });
        return Some(answer.map(|()| json!("")));
    }
    if let Some(field) = operation.strip_prefix("add_to_").filter(|field| is_settable(field)) {
        return Some(add_to(context, class, field, arguments));
    }
    if let Some(field) = operation
        .strip_prefix("remove_from_")
        .filter(|field| is_settable(field))
    {
        let answer = exactly(context.method, arguments).and_then(|[reference, key]| {
            let key = text(key, "key")?;
            context
                .state
                .database
                .change(class, text(reference, "self")?, |record| {
                    if let Some(map) = record.get_mut(field).and_then(Value::as_object_mut) {
                        map.remove(key);
                    }
                })
        });
        return Some(answer.map(|()| json!("")));
    }
    let lists = [("tags", "tags"), ("purpose", "purpose")];
    let (list, _) = lists.into_iter().find(|(_, item)| {
        operation.strip_prefix("add_") == Some(item) || operation.strip_prefix("remove_") == Some(item)
    })?;
    blank
        .contains_key(list)
        .then(|| change_list(context, class, operation, list, arguments))
}

fn add_to(context: &mut Context<'_>, class: &'static str, field: &str, arguments: &[Value]) -> Answer<Value> {
    let [reference, key, value] = exactly(context.method, arguments)?;
    let (reference, key) = (text(reference, "self")?, text(key, "key")?);
    let record = context.state.database.get(class, reference)?;
    let has_key = record.get(field).and_then(|map| map.get(key)).is_some();
    if has_key {
        return Err(Failure::new("MAP_DUPLICATE_KEY", &[class, field, reference, key]));
    }
    context.state.database.change(class, reference, |record| {
        if let Some(map) = record.get_mut(field).and_then(Value::as_object_mut) {
            map.insert(key.to_owned(), value.clone());
        }
    })?;
    Ok(json!(""))
}

fn change_list(
    context: &mut Context<'_>,
    class: &'static str,
    operation: &str,
    list: &str,
    arguments: &[Value],
) -> Answer<Value> {
    let [reference, item] = exactly(context.method, arguments)?;
    let (reference, item) = (text(reference, "self")?, text(item, "value")?);
    context.state.database.get(class, reference)?;
    context.state.database.take_out(class, reference, list, item);
    if operation.starts_with("add_") {
        context.state.database.append(class, reference, list, item)?;
    }
    Ok(json!(""))
}
