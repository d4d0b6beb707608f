//! `joiner`, `cycler`, `dict`, and a dict's methods that are named and not called.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::value::{Object, ObjectRepr, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::bounds::{ITEM, METHODS, Measured, in_time, is_dict, refused};
use super::{arguments, str};

pub(super) fn add_to(env: &mut Environment<'_>) {
    env.add_function("joiner", |given: Rest<Value>| {
        let [separator] = arguments(["sep"], &given)?;
        let separator = separator.map_or(Ok(", ".to_owned()), |separator| str(&separator))?;
        Ok::<_, Error>(Value::from_object(Joiner { separator, num_calls: AtomicUsize::new(0) }))
    });
    env.add_function("cycler", |items: Rest<Value>| {
        if items.is_empty() {
            return Err(refused("`cycler` takes items"));
        }
        Ok(Value::from_object(Cycler { items: Measured::of(items.0.into(), false)?, place: AtomicUsize::new(0) }))
    });
    env.add_function("dict", |given: Rest<Value>| {
        let (pairs, options) = match &given[..] {
            [] => (None, Value::UNDEFINED),
            [options] if options.is_kwargs() => (None, options.clone()),
            [pairs] => (Some(pairs), Value::UNDEFINED),
            [pairs, options] if options.is_kwargs() => (Some(pairs), options.clone()),
            _ => return Err(refused("`dict` takes one argument at most")),
        };
        let mut dict: Vec<(Value, Value)> = Vec::new();
        for given in pairs.into_iter().chain([&options]).filter(|given| !given.is_undefined()) {
            let is_map = given.kind() == ValueKind::Map;
            for pair in given.try_iter()? {
                let (key, value) = if is_map {
                    (pair.clone(), given.get_item(&pair)?)
                } else {
                    (pair.get_item_by_index(0)?, pair.get_item_by_index(1)?)
                };
                dict.push((key, value));
            }
        }
        Ok(dict.into_iter().collect::<Value>())
    });
    env.add_filter(ITEM, item);
    for (name, filter) in METHODS {
        env.add_filter(filter, move |value: &Value| {
            if is_dict(value) { Ok(Value::from_object(Method(name))) } else { value.get_attr(name) }
        });
    }
}

/// `value[key]`.
fn item(value: &Value, key: &Value) -> Result<Value, Error> {
    if value.as_str().is_some() {
        in_time()?;
    }
    let item = value.get_item(key)?;
    let method = |name: &str| METHODS.iter().find(|(known, _)| *known == name && item.is_undefined() && is_dict(value));
    Ok(key.as_str().and_then(method).map_or(item.clone(), |(name, _)| Value::from_object(Method(name))))
}

/// Nothing when it is called first, then what stands between items.
#[derive(Debug)]
struct Joiner {
    separator: String,
    num_calls: AtomicUsize,
}

impl Object for Joiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &State<'_, '_>, _: &[Value]) -> Result<Value, Error> {
        let is_first = self.num_calls.fetch_add(1, Ordering::Relaxed) == 0;
        Ok(if is_first { "" } else { &self.separator }.into())
    }
}

/// Gives its items in turn.
#[derive(Debug)]
pub(super) struct Cycler {
    items: Value,
    place: AtomicUsize,
}

impl Cycler {
    fn current(&self) -> Result<Value, Error> {
        let place = self.place.load(Ordering::Relaxed);
        self.items.get_item_by_index(place % self.items.len().unwrap_or(1))
    }
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        if key.as_str() == Some("current") { self.current().ok() } else { None }
    }

    fn call_method(self: &Arc<Self>, _: &State<'_, '_>, name: &str, _: &[Value]) -> Result<Value, Error> {
        match name {
            "next" => {
                let current = self.current();
                self.place.fetch_add(1, Ordering::Relaxed);
                current
            }
            "reset" => {
                self.place.store(0, Ordering::Relaxed);
                Ok(().into())
            }
            _ => Err(ErrorKind::UnknownMethod.into()),
        }
    }
}

/// A method that is named and not called. It is true, and has nothing.
#[derive(Debug)]
pub(super) struct Method(pub(super) &'static str);

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "<built-in method {} of dict object>", self.0)
    }
}
