//! Metrics as OpenTelemetry has them, made of the OpenMetrics text that `GET /metrics` answers:
//! nobody is told anything else.

use std::time::{SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint,
    ResourceMetrics, ScopeMetrics, Sum,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message as _;

/// Origin of metrics.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    /// Attributes that identify the server: names and values.
    pub attributes: Vec<(&'static str, String)>,
    /// Since when counters count.
    pub since: SystemTime,
}

/// The message that has the metrics of `text` as of `now`.
pub(crate) fn message(text: &str, origin: &Origin, now: SystemTime) -> Vec<u8> {
    request(text, origin, now).encode_to_vec()
}

fn request(text: &str, origin: &Origin, now: SystemTime) -> ExportMetricsServiceRequest {
    let times = Times {
        since: nanoseconds(origin.since),
        now: nanoseconds(now),
    };
    let attributes = origin.attributes.iter();
    let attributes = attributes.map(|(name, value)| attribute(name, value));
    ExportMetricsServiceRequest {
        resource_metrics: vec![ResourceMetrics {
            resource: Some(Resource {
                attributes: attributes.collect(),
                ..Resource::default()
            }),
            scope_metrics: vec![ScopeMetrics {
                scope: Some(InstrumentationScope {
                    name: "stillframe".to_owned(),
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                    ..InstrumentationScope::default()
                }),
                metrics: metrics(text, times),
                ..ScopeMetrics::default()
            }],
            ..ResourceMetrics::default()
        }],
    }
}

/// In nanoseconds since 1970.
#[derive(Clone, Copy)]
struct Times {
    since: u64,
    now: u64,
}

fn nanoseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}

fn attribute(name: &str, value: &str) -> KeyValue {
    KeyValue {
        key: name.to_owned(),
        value: Some(AnyValue {
            value: Some(Value::StringValue(value.to_owned())),
        }),
        ..KeyValue::default()
    }
}

/// All metrics of a text.
fn metrics(text: &str, times: Times) -> Vec<Metric> {
    let mut metrics: Vec<Metric> = Vec::new();
    for line in text.lines() {
        let Some(comment) = line.strip_prefix("# ") else {
            if let (Some(metric), Some(sample)) = (metrics.last_mut(), Sample::of(line)) {
                add(metric, &sample, times);
            }
            continue;
        };
        let mut words = comment.splitn(3, ' ');
        let (what, name) = (words.next(), words.next().unwrap_or_default());
        let rest = words.next().unwrap_or_default();
        if metrics.last().is_none_or(|metric| metric.name != name) && what != Some("EOF") {
            metrics.push(Metric {
                name: name.to_owned(),
                ..Metric::default()
            });
        }
        let Some(metric) = metrics.last_mut() else {
            continue;
        };
        match what {
            Some("HELP") => metric.description = rest.trim_end_matches('.').to_owned(),
            Some("UNIT") => metric.unit = unit(rest).to_owned(),
            Some("TYPE") => metric.data = data(rest),
            _ => {}
        }
    }
    metrics.retain(|metric| metric.data.is_some());
    metrics
}

/// As UCUM has it.
fn unit(name: &str) -> &str {
    match name {
        "bytes" => "By",
        "seconds" => "s",
        other => other,
    }
}

fn data(kind: &str) -> Option<Data> {
    let aggregation_temporality = AggregationTemporality::Cumulative.into();
    match kind {
        "counter" => Some(Data::Sum(Sum {
            data_points: Vec::new(),
            aggregation_temporality,
            is_monotonic: true,
        })),
        "gauge" => Some(Data::Gauge(Gauge::default())),
        "histogram" => Some(Data::Histogram(Histogram {
            data_points: Vec::new(),
            aggregation_temporality,
        })),
        _ => None,
    }
}

/// A line of a text: what of a metric, with which labels, is how much.
struct Sample<'a> {
    name: &'a str,
    labels: Vec<(&'a str, &'a str)>,
    value: &'a str,
}

impl<'a> Sample<'a> {
    /// Our labels' values have no quotes, commas or spaces in them.
    fn of(line: &'a str) -> Option<Self> {
        let (series, value) = line.split_once(' ')?;
        let (name, labels) = match series.split_once('{') {
            Some((name, labels)) => (name, labels.strip_suffix('}')?),
            None => (series, ""),
        };
        let labels = labels.split(',').filter_map(|label| {
            let (name, value) = label.split_once('=')?;
            Some((name, value.trim_matches('"')))
        });
        Some(Self {
            name,
            labels: labels.collect(),
            value,
        })
    }

    fn attributes(&self) -> Vec<KeyValue> {
        let labels = self.labels.iter().filter(|(name, _)| *name != "le");
        labels.map(|(name, value)| attribute(name, value)).collect()
    }
}

/// Adds a sample to the metric that it is of.
fn add(metric: &mut Metric, sample: &Sample<'_>, times: Times) {
    let attributes = sample.attributes();
    match &mut metric.data {
        Some(Data::Sum(sum)) => {
            let start_time_unix_nano = times.since;
            sum.data_points.push(NumberDataPoint {
                start_time_unix_nano,
                ..number(sample, attributes, times)
            });
        }
        Some(Data::Gauge(gauge)) => gauge.data_points.push(number(sample, attributes, times)),
        Some(Data::Histogram(histogram)) => {
            let points = &mut histogram.data_points;
            if points
                .last()
                .is_none_or(|point| point.attributes != attributes)
            {
                points.push(HistogramDataPoint {
                    attributes,
                    start_time_unix_nano: times.since,
                    time_unix_nano: times.now,
                    ..HistogramDataPoint::default()
                });
            }
            if let Some(point) = points.last_mut() {
                add_to(point, sample);
            }
        }
        _ => {}
    }
}

fn number(sample: &Sample<'_>, attributes: Vec<KeyValue>, times: Times) -> NumberDataPoint {
    let value = match sample.value.parse() {
        Ok(whole) => number_data_point::Value::AsInt(whole),
        Err(_) => number_data_point::Value::AsDouble(sample.value.parse().unwrap_or_default()),
    };
    NumberDataPoint {
        attributes,
        time_unix_nano: times.now,
        value: Some(value),
        ..NumberDataPoint::default()
    }
}

/// Buckets are told in ascending order, each with all that are below it.
fn add_to(point: &mut HistogramDataPoint, sample: &Sample<'_>) {
    let count = || sample.value.parse::<u64>().unwrap_or_default();
    if sample.name.ends_with("_sum") {
        point.sum = sample.value.parse().ok();
    } else if sample.name.ends_with("_count") {
        point.count = count();
    } else if let Some((_, bound)) = sample.labels.iter().find(|(name, _)| *name == "le") {
        let below = point.bucket_counts.iter().sum::<u64>();
        point.bucket_counts.push(count().saturating_sub(below));
        if *bound != "+Inf" {
            point.explicit_bounds.extend(bound.parse::<f64>().ok());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus_client::registry::Registry;

    use super::*;

    /// All that is told of a text.
    fn told(text: &str) -> Vec<Metric> {
        let since = UNIX_EPOCH + Duration::from_secs(100);
        let origin = Origin {
            attributes: vec![("service.name", "stillframe".to_owned())],
            since,
        };
        let bytes = message(text, &origin, since + Duration::from_secs(5));
        let request = ExportMetricsServiceRequest::decode(&bytes[..]).expect("a message");
        let resource = &request.resource_metrics[0];
        let attributes = &resource.resource.as_ref().expect("a resource").attributes;
        assert_eq!(attributes[0], attribute("service.name", "stillframe"));
        resource.scope_metrics[0].metrics.clone()
    }

    #[test]
    fn each_kind_of_metric_is_told_as_what_it_is() {
        let metrics = told(
            "# HELP a_faults Faults.\n# TYPE a_faults counter\n\
             a_faults_total{kind=\"missing\",page_size=\"4096\"} 7\n\
             a_faults_total{kind=\"minor\",page_size=\"4096\"} 8\n\
             # HELP a_there_bytes There.\n# TYPE a_there_bytes gauge\n# UNIT a_there_bytes bytes\n\
             a_there_bytes -3\n\
             # HELP a_took_seconds Took.\n# TYPE a_took_seconds histogram\n\
             # UNIT a_took_seconds seconds\n\
             a_took_seconds_sum{kind=\"x\"} 1.5\na_took_seconds_count{kind=\"x\"} 4\n\
             a_took_seconds_bucket{le=\"0.1\",kind=\"x\"} 1\n\
             a_took_seconds_bucket{le=\"0.2\",kind=\"x\"} 3\n\
             a_took_seconds_bucket{le=\"+Inf\",kind=\"x\"} 4\n# EOF\n",
        );
        let names = metrics.iter().map(|metric| (&*metric.name, &*metric.unit));
        assert_eq!(
            names.collect::<Vec<_>>(),
            [
                ("a_faults", ""),
                ("a_there_bytes", "By"),
                ("a_took_seconds", "s")
            ]
        );
        let Some(Data::Sum(sum)) = &metrics[0].data else {
            panic!("{:?}", metrics[0]);
        };
        assert!(sum.is_monotonic && sum.aggregation_temporality == 2);
        let points = &sum.data_points;
        assert_eq!(points[1].value, Some(number_data_point::Value::AsInt(8)));
        assert_eq!(points[1].attributes[0], attribute("kind", "minor"));
        assert_eq!(points[1].start_time_unix_nano, 100_000_000_000);
        assert_eq!(points[1].time_unix_nano, 105_000_000_000);
        let Some(Data::Gauge(gauge)) = &metrics[1].data else {
            panic!("{:?}", metrics[1]);
        };
        let value = number_data_point::Value::AsInt(-3);
        assert_eq!(gauge.data_points[0].value, Some(value));
        let Some(Data::Histogram(histogram)) = &metrics[2].data else {
            panic!("{:?}", metrics[2]);
        };
        let point = &histogram.data_points[0];
        assert_eq!((point.count, point.sum), (4, Some(1.5)));
        assert_eq!(point.bucket_counts, [1, 2, 1]);
        assert_eq!(point.explicit_bounds, [0.1, 0.2]);
        assert_eq!(point.attributes, [attribute("kind", "x")]);
    }

    #[test]
    fn every_metric_of_a_server_is_told() {
        let mut registry = Registry::default();
        serve::Metrics::new().register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("text");
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        let names = types.filter_map(|line| line.split(' ').next());
        let metrics = told(&text);
        let told = metrics.iter().map(|metric| &*metric.name);
        assert_eq!(names.collect::<Vec<_>>(), told.collect::<Vec<_>>());
    }
}
