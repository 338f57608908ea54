# Signals, an alarm's handler, regular expressions, and a child at the other end of a socket pair.
use strict; use warnings; use Socket; use IO::Handle; use Digest::SHA qw(sha256_hex);
use Time::HiRes qw(setitimer ITIMER_REAL);
my $ticks = 0;
$SIG{ALRM} = sub { $ticks++ };
setitimer(ITIMER_REAL, 0.005, 0.005);
socketpair(my $near, my $far, AF_UNIX, SOCK_STREAM, PF_UNSPEC) or die;
$near->autoflush(1); $far->autoflush(1);
my $child = fork // die;
if (!$child) {
    close $near;
    setitimer(ITIMER_REAL, 0);
    while (<$far>) { chomp; print $far sha256_hex($_), "\n" }
    exit 0;
}
close $far;
for (my $step = 1; ; $step++) {
    my %counts;
    my $text = join ' ', map { ($_ * 7919 + $step) % 10007 } 1 .. 20000;
    $counts{length $1}{$1}++ while $text =~ /(\d*[13579])\b/g;
    my $sorted = join ',', map { my $n = $_; map { "$_$counts{$n}{$_}" } sort keys %{$counts{$n}} } sort keys %counts;
    print $near sha256_hex($sorted), "\n";
    my $back = <$near>;
    open my $out, '>>', 'steps' or die;
    print $out "$step $back";
    close $out;
    last if -e 'stop';
}
setitimer(ITIMER_REAL, 0);
close $near;
waitpid $child, 0;
exit($? == 0 && $ticks > 0 ? 0 : 5);
