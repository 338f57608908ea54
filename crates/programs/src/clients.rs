//! What clients of servers do, in the servers' protocols.
use crate::error::{Result, failure};
use crate::serve::{Line, expect};

/// The file that clients of HTTP get.
pub const NUMBERS: &str = "0123456789012345678901234567890123456789";

/// Says nothing.
pub fn silent(_: &mut Line, _: usize, _: u64) -> Result<()> {
    Ok(())
}

/// redis: counts in a key of the client's own, and gets a value back.
pub fn redis(line: &mut Line, client: usize, number: u64) -> Result<()> {
    line.ask(&format!("INCR count:{client}\r\n"), &format!(":{number}"))?;
    let value = format!("value {number} of {client}");
    let key = format!("key:{client}:{}", number % 1000);
    line.ask(&format!("SET {key} \"{value}\"\r\n"), "+OK")?;
    line.ask(&format!("GET {key}\r\n"), &format!("${}", value.len()))?;
    expect(&line.line()?, &value)
}

/// memcached: makes a counter.
pub fn memcached_greet(line: &mut Line, client: usize, _: u64) -> Result<()> {
    line.ask(&format!("set count{client} 0 0 1\r\n0\r\n"), "STORED")
}

/// memcached: counts, and gets a value back.
pub fn memcached(line: &mut Line, client: usize, number: u64) -> Result<()> {
    line.ask(&format!("incr count{client} 1\r\n"), &number.to_string())?;
    let value = format!("value {number} of {client}");
    let key = format!("key{client}-{}", number % 1000);
    let bytes = value.len();
    line.ask(&format!("set {key} 0 0 {bytes}\r\n{value}\r\n"), "STORED")?;
    line.ask(&format!("get {key}\r\n"), &format!("VALUE {key} 0 {bytes}"))?;
    expect(&line.line()?, &value)?;
    expect(&line.line()?, "END")
}

/// HTTP: gets the file `data`, which holds [`NUMBERS`], over one connection.
pub fn http(line: &mut Line, _: usize, number: u64) -> Result<()> {
    let path = format!("/data?{number}");
    line.send(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"))?;
    expect(&line.line()?, "HTTP/1.1 200 OK")?;
    let mut length = None;
    loop {
        let header = line.line()?.to_ascii_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(value) = header.strip_prefix("content-length:") {
            length = value.trim().parse().ok();
        }
    }
    let length = length.ok_or_else(|| failure("an answer without a length"))?;
    let body = line.bytes(length)?;
    expect(&String::from_utf8_lossy(&body), NUMBERS)
}

/// MQTT: connects, and subscribes to a topic of the client's own.
pub fn mqtt_greet(line: &mut Line, client: usize, _: u64) -> Result<()> {
    let name = format!("client{client}");
    let mut connect = text("MQTT");
    // Version 3.1.1, a clean session, no keep-alive.
    connect.extend([4, 2, 0, 0]);
    connect.extend(text(&name));
    line.send(packet(0x10, &connect))?;
    if line.bytes(4)? != [0x20, 2, 0, 0] {
        return Err(failure("the broker does not accept a client"));
    }
    let mut subscribe = vec![0, 1];
    subscribe.extend(text(&format!("topic/{client}")));
    subscribe.push(1);
    line.send(packet(0x82, &subscribe))?;
    if line.bytes(5)? != [0x90, 3, 0, 1, 1] {
        return Err(failure("the broker does not take a subscription"));
    }
    Ok(())
}

/// MQTT: sends a message that is to be confirmed, and receives it.
pub fn mqtt(line: &mut Line, client: usize, number: u64) -> Result<()> {
    let id = (number % 0xffff + 1) as u16;
    let mut publish = text(&format!("topic/{client}"));
    let wanted = format!("message {number}");
    publish.extend(id.to_be_bytes());
    publish.extend(wanted.bytes());
    line.send(packet(0x32, &publish))?;
    let (mut confirmed, mut received) = (false, false);
    while !confirmed || !received {
        let head = line.bytes(2)?;
        let body = line.bytes(usize::from(head[1]))?;
        match head[0] & 0xf0 {
            0x40 if body == id.to_be_bytes() && !confirmed => confirmed = true,
            0x30 if body.ends_with(wanted.as_bytes()) && !received => {
                received = true;
                let topic = usize::from(u16::from_be_bytes([body[0], body[1]]));
                line.send(packet(0x40, &body[2 + topic..4 + topic]))?;
            }
            other => {
                return Err(failure(format!("packet {other:#x} {body:?} for {number}")));
            }
        }
    }
    Ok(())
}

/// A string in MQTT: its length stands before it.
fn text(text: &str) -> Vec<u8> {
    let length = u16::try_from(text.len()).unwrap_or(u16::MAX);
    let mut bytes = length.to_be_bytes().to_vec();
    bytes.extend(text.bytes());
    bytes
}

/// A short MQTT packet.
fn packet(kind: u8, body: &[u8]) -> Vec<u8> {
    let length = u8::try_from(body.len()).unwrap_or(0x7f).min(0x7f);
    let mut bytes = vec![kind, length];
    bytes.extend(body);
    bytes
}

/// STOMP: connects, and subscribes to a queue of the client's own.
pub fn stomp_greet(line: &mut Line, client: usize, _: u64) -> Result<()> {
    let connect = "CONNECT\naccept-version:1.2\nhost:/\nlogin:guest\npasscode:guest\n\n\0";
    line.send(connect)?;
    frame(line, "CONNECTED")?;
    line.send(format!(
        "SUBSCRIBE\nid:0\ndestination:/queue/q{client}\nack:auto\nreceipt:0\n\n\0"
    ))?;
    frame(line, "RECEIPT").map(|_| ())
}

/// STOMP: sends a message and receives it.
pub fn stomp(line: &mut Line, client: usize, number: u64) -> Result<()> {
    let wanted = format!("message {number}");
    line.send(format!("SEND\ndestination:/queue/q{client}\n\n{wanted}\0"))?;
    let body = frame(line, "MESSAGE")?;
    expect(&body, &wanted)
}

/// Receives a frame of STOMP, and returns its body.
fn frame(line: &mut Line, wanted: &str) -> Result<String> {
    let bytes = line.until(0)?;
    let text = String::from_utf8_lossy(&bytes);
    let text = text.trim_start_matches('\n').trim_end_matches('\0');
    let (head, body) = text.split_once("\n\n").unwrap_or((text, ""));
    expect(head.lines().next().unwrap_or_default(), wanted)?;
    Ok(body.to_owned())
}
