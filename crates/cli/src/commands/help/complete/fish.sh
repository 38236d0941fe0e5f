# Completion of holdfast for fish. The program itself finds what can stand at the cursor.
function __holdfast_complete
    set -l word (commandline -ct)
    set -l found (command holdfast complete -- (commandline -opc) "$word" 2>/dev/null)
    switch "$found[1]"
        case files
            __fish_complete_path "$word"
        case folders
            __fish_complete_directories "$word"
    end
    printf '%s\n' $found[2..-1]
end
complete -c holdfast -f -a '(__holdfast_complete)'
