# Runs sanoid again and again: loading its modules takes longer than a run.
#
#   perl serve.pl SANOID OUTPUT ERRORS
#
# Each line of standard input is a run, with tabs between its words: variables of the environment as NAME=VALUE, and
# arguments that begin with "--". A run is a process of its own, and its output goes to the files OUTPUT and ERRORS. The
# answer is a line with its exit code. FIXED_TIME, if it is set, is the time that sanoid sees.
use strict;
use warnings;

# Before any module that could ask for the time.
BEGIN {
    no warnings 'once';
    *CORE::GLOBAL::time = sub () { $ENV{FIXED_TIME} // CORE::time() };
}

# What sanoid loads.
use Capture::Tiny;
use Config::IniFiles;
use Data::Dumper;
use File::Path;
use Getopt::Long;
use POSIX ();
use Pod::Usage;
use Time::Local;

my ($sanoid, $output, $errors) = @ARGV;
$| = 1;
while (my $line = <STDIN>) {
    chomp $line;
    my $process = fork() // die "fork: $!";
    if ($process == 0) {
        open(STDIN, '<', '/dev/null') or die "/dev/null: $!";
        open(STDOUT, '>', $output) or die "$output: $!";
        open(STDERR, '>', $errors) or die "$errors: $!";
        @ARGV = ();
        for my $word (split /\t/, $line) {
            if ($word =~ /^--/) {
                push @ARGV, $word;
            } else {
                my ($name, $value) = split /=/, $word, 2;
                $ENV{$name} = $value;
            }
        }
        POSIX::tzset();
        $0 = $sanoid;
        do $sanoid;
        die $@ if $@;
        exit 0;
    }
    waitpid($process, 0);
    # A process that was killed has no exit code.
    print $? & 127 ? 255 : $? >> 8, "\n";
}
